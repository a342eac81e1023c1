"""Chunk files: what is written is read bit for bit, and nothing else is ever read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvlinker.base.events import ChunkDamaged
from kvlinker.base.types.chunk_scores import ChunkScores, Contextualization
from kvlinker.store import ChunkKV, DiskTier, LayerKV
from kvlinker.store.chunk_kv import ChunkState
from kvlinker.store.format import chunk_file
from kvlinker.store.format import header as chunk_header
from kvlinker.store.format.byte_source import BufferSource
from kvlinker.store.format.chunk_file import (
    decode_chunk,
    encode_chunk,
    open_chunk,
    read_chunk_file,
    write_chunk_file,
)
from kvlinker.store.format.codecs import RAW, Codec, known_codecs
from kvlinker.store.format.compression import MissingLibraryError
from kvlinker.store.format.header import ChunkFileError, states_of
from tests.properties import examples
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv

KEY = key_of(1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def write(path: Path, kv: ChunkKV, key: str = KEY, codec: Codec = RAW) -> bytes:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        write_chunk_file(file, encode_chunk(key, kv, codec))
    return path.read_bytes()


def overwrite(path: Path, data: bytes | bytearray) -> None:
    path.unlink(missing_ok=True)  # truncating a file instead makes ext4 wait for the disk
    path.write_bytes(data)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "chunk.safetensors"


def test_round_trip_keeps_every_bit(path: Path, subtests: pytest.Subtests) -> None:
    for dtype, tokens in product(DTYPES, (1, 5)):
        with subtests.test(dtype=dtype, tokens=tokens):
            kv = chunk_kv(7, tokens=tokens, layers=3, dtype=dtype)
            write(path, kv)
            assert same_kv(read_chunk_file(path, KEY), kv)


@pytest.mark.parametrize("measured", [True, False])
def test_scores_come_back_with_the_sensitivity_where_it_was_measured(
    path: Path, measured: bool
) -> None:
    """Files that were written before sensitivity was have none, and are read."""
    inter, received, sensitivity = np.random.default_rng(0).random((3, 5), dtype=np.float32)
    scores = ChunkScores(
        Contextualization(5, 1.5), inter, received, sensitivity if measured else None
    )
    kv = replace(chunk_kv(7, tokens=5), scores=scores)
    names = ["scores.inter", "scores.received", "scores.sensitivity"][: 3 if measured else 2]
    write(path, kv)
    assert [name for name in load_file(path) if name.startswith("scores.")] == names
    read = read_chunk_file(path, KEY)
    assert same_kv(read, replace(kv, scores=None))
    assert read.scores is not None
    assert read.scores.contextualization == scores.contextualization
    assert (read.scores.inter == inter).all()
    assert (read.scores.received == received).all()
    assert (
        (read.scores.sensitivity == sensitivity).all()
        if measured
        else read.scores.sensitivity is None
    )


def chunk_states(*, whole: bool) -> tuple[ChunkState, ...]:
    """Of one layer whose tokens are all kept, and of two with maps, one with its inner tokens, and
    of one that only convolves."""
    generator = torch.Generator().manual_seed(5)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    short = ChunkState(tensor(5, 8), (tensor(5, 2), tensor(5, 2, 3)))
    effect = tensor(2, 1, 1, dtype=torch.bfloat16), tensor(2, 3, 4, dtype=torch.bfloat16)
    inner = (tensor(9, 8), tensor(9, 2))
    mapped = ChunkState(tensor(6, 8), (tensor(3, 2),), effect)
    convolved = ChunkState(tensor(2, 8), (), None, (tensor(7, 8),))
    return (short,) if whole else (mapped, replace(mapped, inner=inner), convolved)


def same_states(left: tuple[ChunkState, ...], right: tuple[ChunkState, ...]) -> bool:
    tensors = [[tensor for state in states for tensor in state.tensors] for states in (left, right)]
    forms = [
        [(len(s.gates), s.effect is None, len(s.inner)) for s in states] for states in (left, right)
    ]
    return forms[0] == forms[1] and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*tensors, strict=True)
    )


def test_states_come_back_as_they_were(path: Path, subtests: pytest.Subtests) -> None:
    for codec, whole in product(("raw", "int8", "raw+zstd"), (True, False)):
        with subtests.test(codec, whole=whole):
            kv = replace(
                chunk_kv(7, tokens=5, dtype=torch.float32), states=chunk_states(whole=whole)
            )
            finite = tuple(
                LayerKV(each.key.nan_to_num(), each.value.nan_to_num()) for each in kv.layers
            )
            kv = replace(kv, layers=finite)
            write(path, kv, codec=known_codecs()[codec])
            read = read_chunk_file(path, KEY)
            assert same_states(read.states, kv.states)
            assert read.nbytes == kv.nbytes


def indexed(kv: ChunkKV) -> ChunkKV:
    """The chunk with what an indexer keeps in its last layer but one."""
    *others, one, last = (LayerKV(each.key, each.value) for each in kv.layers)
    index = torch.randn(1, kv.tokens, 6, generator=torch.Generator().manual_seed(3))
    return replace(kv, layers=(*others, replace(one, index=index.to(one.key)), last))


@pytest.mark.parametrize("codec", ["raw", "raw+zstd"])
def test_what_indexers_keep_comes_back_as_it_was(path: Path, codec: str) -> None:
    """Beside states, too; files that have it are of a version of their own."""
    kv = replace(indexed(chunk_kv(7, tokens=5, layers=3)), states=chunk_states(whole=True))
    data = write(path, kv, codec=known_codecs()[codec])
    assert b'"version":"6"' in data
    names = [name for name in load_file(path) if name.endswith(".index")]
    assert names == ["layer.01.index"]
    read = read_chunk_file(path, KEY)
    assert [each.index is not None for each in read.layers] == [False, True, False]
    assert same_kv(read, kv)
    assert read.nbytes == kv.nbytes


def test_codecs_take_what_indexers_keep_by_itself(path: Path) -> None:
    """Its numbers have a scale of their own."""
    layers = tuple(LayerKV(torch.randn(2, 5, 8) * 1000, torch.randn(2, 5, 8)) for _ in range(2))
    kv = indexed(ChunkKV(layers))
    write(path, kv, codec=known_codecs()["int8"])
    read, kept = read_chunk_file(path, KEY).layers[0].index, kv.layers[0].index
    assert read is not None
    assert kept is not None
    torch.testing.assert_close(read, kept, rtol=0, atol=float(kept.abs().max()) / 127)


def test_an_index_without_a_value_is_refused(path: Path) -> None:
    kv = ChunkKV((LayerKV(torch.ones(1, 2, 4), torch.ones(1, 2, 4)),))
    names = ["layer.00.key", "layer.00.index"]
    with mock.patch.object(chunk_file, "heads_names", return_value=names):
        write(path, kv)
    with pytest.raises(ChunkFileError, match="not layers in order"):
        read_chunk_file(path, KEY)


def test_chunks_without_kv_say_how_many_tokens_they_have(path: Path) -> None:
    kv = ChunkKV((), None, chunk_states(whole=False), 12)
    data = write(path, kv)
    read = read_chunk_file(path, KEY)
    assert (read.tokens, read.layers, read.scores) == (12, (), None)
    assert same_states(read.states, kv.states)
    assert b'"version":"7"' in data
    opened = open_chunk(BufferSource(np.frombuffer(bytearray(data), np.uint8)), KEY)
    assert (opened.layers, opened.tokens, opened.nbytes) == (0, 12, 0)


def test_a_mean_says_over_how_many_contexts_it_is(path: Path) -> None:
    data = write(path, replace(chunk_kv(1), contexts=3))
    read = read_chunk_file(path, KEY)
    assert read.contexts == 3
    assert same_kv(read, chunk_kv(1))
    assert open_chunk(BufferSource(np.frombuffer(bytearray(data), np.uint8)), KEY).contexts == 3
    write(path, chunk_kv(1))
    assert read_chunk_file(path, KEY).contexts == 1


def test_a_chunk_has_kv_or_tokens() -> None:
    with pytest.raises(ValueError, match="needs its number of tokens"):
        ChunkKV((), None, chunk_states(whole=True))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "KeyError: 'tokens'"),
        ({"tokens": "0"}, "neither layers nor states"),
        ({"tokens": "twelve"}, "invalid literal"),
    ],
)
def test_without_kv_the_header_says_the_number_of_tokens(
    path: Path, fields: dict[str, str], reason: str
) -> None:
    def changed(header: dict) -> None:
        del header["__metadata__"]["tokens"]
        header["__metadata__"].update(fields)

    forge(path, changed, ChunkKV((), None, chunk_states(whole=False), 12))
    with pytest.raises(ChunkFileError, match=reason):
        read_chunk_file(path, KEY)


def test_a_damaged_state_is_not_read(path: Path) -> None:
    kv = replace(chunk_kv(7, tokens=5), states=chunk_states(whole=False))
    data = bytearray(write(path, kv))
    length = 8 + int.from_bytes(data[:8], "little")
    data[length + 3] ^= 1  # in the first state
    overwrite(path, data)
    with pytest.raises(ChunkFileError, match=r"state\.0000\.mixed does not match its checksum"):
        read_chunk_file(path, KEY)


OTHER_FORMS = [
    ["state.0001.mixed", "state.0001.gate.0"],
    ["state.0000.gate.0"],
    ["state.0000.gate.0", "state.0000.mixed"],
    ["state.0000.mixed", "state.0000.gate.0", "state.0000.factor"],
    ["state.0000.mixed", "state.0000.gate.0", "state.0000.inner.0"],
    ["state.0000.mixed", "state.0000.gate.1"],
    ["state.0000.mixed", "state.0000.gate.0", "state.0000.other"],
]


def test_states_of_another_form_are_refused(subtests: pytest.Subtests) -> None:
    for names in OTHER_FORMS:
        with subtests.test(names=names), pytest.raises(ValueError, match=r"layer|states"):
            states_of([(name, torch.ones(3, 2)) for name in names])


def test_layers_may_differ_in_heads_and_share_memory(path: Path) -> None:
    wide, narrow = chunk_kv(1, kv_heads=8).layers[0], chunk_kv(2, kv_heads=1).layers[0]
    kv = ChunkKV((wide, LayerKV(narrow.key, narrow.key)))
    write(path, kv)
    assert same_kv(read_chunk_file(path, KEY), kv)


def test_any_safetensors_reader_reads_it(path: Path) -> None:
    kv = chunk_kv(3, layers=2)
    write(path, kv)
    tensors = load_file(path)
    assert set(tensors) == {"layer.00.key", "layer.00.value", "layer.01.key", "layer.01.value"}
    read = [
        LayerKV(tensors[f"layer.{index:02d}.key"], tensors[f"layer.{index:02d}.value"])
        for index in range(2)
    ]
    assert same_kv(ChunkKV(tuple(read)), kv)


def test_layers_lie_in_order_even_beyond_a_hundred(path: Path) -> None:
    kv = chunk_kv(4, layers=101, tokens=1, kv_heads=1)
    data = write(path, kv)
    raw = b"".join(
        part.view(torch.uint8).numpy().tobytes()
        for layer in kv.layers
        for part in (layer.key, layer.value)
    )
    assert data.endswith(raw)
    assert same_kv(read_chunk_file(path, KEY), kv)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer\.00\.key is torch\.float64"):
        encode_chunk(KEY, chunk_kv(1, dtype=torch.float64))
    mixed = ChunkKV((chunk_kv(1).layers[0], chunk_kv(1, dtype=torch.float32).layers[0]))
    with pytest.raises(ValueError, match=r"layer\.01\.key is torch\.float32"):
        encode_chunk(KEY, mixed)


def test_no_tokens_are_no_chunk() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        encode_chunk(KEY, chunk_kv(1, tokens=0))


def test_another_chunks_file_is_refused(path: Path) -> None:
    write(path, chunk_kv(1), key_of(2))
    with pytest.raises(ChunkFileError, match=key_of(2)):
        read_chunk_file(path, KEY)


def test_another_version_is_refused(path: Path) -> None:
    with mock.patch.object(chunk_header, "FORMAT_VERSION", 2):
        write(path, chunk_kv(1))
    with pytest.raises(ChunkFileError, match="kvlinker-chunk 2, not kvlinker-chunk 3 to 7"):
        read_chunk_file(path, KEY)


def test_a_newer_version_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a miss, in a tier, in ``check`` and beside a write of the same chunk, and says which
    version it is of."""
    recorder = Recorder()
    tier = DiskTier(tmp_path, 1 << 20, recorder.events)
    with mock.patch.object(chunk_header, "FORMAT_VERSION", 8):
        assert tier.put(KEY, chunk_kv(1))
    (file,) = tmp_path.rglob("*.safetensors")
    before = file.read_bytes()
    assert tier.get(KEY) is None
    assert tier.open(KEY) is None
    assert tier.check().damaged == ()
    tier.put(KEY, chunk_kv(1))
    assert file.read_bytes() == before
    assert recorder.of(ChunkDamaged) == []
    assert "a newer kvlinker wrote it (kvlinker-chunk 8, this one knows up to 7)" in caplog.text


def test_damage_to_the_version_is_no_newer_version(path: Path) -> None:
    data = write(path, chunk_kv(1))
    overwrite(path, data.replace(b'"version":"3"', b'"version":"7"'))
    with pytest.raises(ChunkFileError, match="does not match its checksum"):
        read_chunk_file(path, KEY)


def test_every_truncation_and_extension_is_found(path: Path) -> None:
    data = write(path, chunk_kv(1))
    for cut in [data[:size] for size in range(len(data))] + [data + b"\0", data + data]:
        overwrite(path, cut)
        with pytest.raises(ChunkFileError):
            read_chunk_file(path, KEY)


def test_no_changed_byte_goes_unnoticed(path: Path) -> None:
    kv = chunk_kv(1)
    data = write(path, kv)
    unnoticed = 0
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        overwrite(path, changed)
        try:
            read = read_chunk_file(path, KEY)
        except ChunkFileError:
            continue
        assert same_kv(read, kv)  # white space behind the header's JSON carries nothing
        unnoticed += 1
    assert unnoticed < 8


@examples(300)
@given(flips=st.sets(st.integers(0, 10**9), min_size=1, max_size=20))
def test_flipped_bits_never_give_other_data(path: Path, flips: set[int]) -> None:
    kv = chunk_kv(1)
    changed = bytearray(write(path, kv))
    for flip in flips:
        position = flip % (len(changed) * 8)
        changed[position // 8] ^= 1 << position % 8
    overwrite(path, changed)
    try:
        read = read_chunk_file(path, KEY)
    except ChunkFileError:
        return
    assert same_kv(read, kv)


@examples(50)
@given(
    text=st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)
    )
)
def test_any_other_header_is_refused(path: Path, text: object) -> None:
    header = json.dumps(text).encode()
    overwrite(path, len(header).to_bytes(8, "little") + header)
    with pytest.raises(ChunkFileError):
        read_chunk_file(path, KEY)


@examples(200)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused(path: Path, data: bytes) -> None:
    overwrite(path, data)
    with pytest.raises(ChunkFileError):
        read_chunk_file(path, KEY)


def test_a_deeply_nested_header_is_refused(path: Path) -> None:
    header = b"[" * 200_000
    overwrite(path, len(header).to_bytes(8, "little") + header)
    with pytest.raises(ChunkFileError):
        read_chunk_file(path, KEY)


def forge(path: Path, change, kv: ChunkKV | None = None) -> None:
    """A file whose checksums are right and whose header was changed by ``change(header)``."""
    data = write(path, kv or chunk_kv(1))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"].pop("xxh3_128.header")
    header = change(header) or header
    for name in header.keys() - {"__metadata__"}:
        start, end = header[name]["data_offsets"]
        checksum = xxhash.xxh3_128_hexdigest(data[8 + length + start : 8 + length + end])
        header["__metadata__"].setdefault(f"xxh3_128.{name}", checksum)
    text = json.dumps(header, separators=(",", ":")).encode()
    header["__metadata__"]["xxh3_128.header"] = xxhash.xxh3_128_hexdigest(text)
    text = json.dumps(header, separators=(",", ":")).encode()
    overwrite(path, len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_forged_header_that_changes_nothing_is_read(path: Path) -> None:
    forge(path, lambda header: None)
    assert same_kv(read_chunk_file(path, KEY), chunk_kv(1))


SENSELESS: list[Callable[[dict], object]] = [
    lambda h: h.pop("layer.01.value"),
    lambda h: h["__metadata__"].pop("key"),
    lambda h: h["layer.00.key"].update(shape=[2, 4, 3]),
    lambda h: h["layer.00.key"].update(shape=[-2, -3, 4]),
    lambda h: h["layer.00.key"].update(shape=[2.0, 3, 4]),
    lambda h: h["layer.00.key"].update(shape=[24]),
    lambda h: h["layer.00.key"].update(dtype="F16"),
    lambda h: h["layer.00.key"].update(dtype="F64"),
    lambda h: h["layer.00.key"].update(data_offsets=[8, 56]),
    lambda h: h["__metadata__"].update(codec="int8"),
    lambda h: h["__metadata__"].pop("codec"),
    lambda h: h["__metadata__"].update(codec=["raw"]),
    lambda h: h["__metadata__"].update(dtype="F32"),
    lambda h: h["__metadata__"].update(dtype="I8"),
    lambda h: h["__metadata__"].update(contexts="0"),
    lambda h: h["__metadata__"].update(contexts="a few"),
    lambda h: h["layer.01.value"].update(shape=[2, 3, 1 << 40]),
    lambda h: {name: h[name] for name in reversed(h)},
    lambda h: {"__metadata__": h["__metadata__"]},
    lambda h: {name.replace("layer.01", "layer.00.old"): fields for name, fields in h.items()},
]


def test_a_header_that_makes_no_sense_is_refused(path: Path, subtests: pytest.Subtests) -> None:
    for number, change in enumerate(SENSELESS):
        with subtests.test(number=number):

            def only_in_place(header: dict, change=change) -> dict | None:
                changed = change(header)
                return changed if isinstance(changed, dict) and "__metadata__" in changed else None

            forge(path, only_in_place)
            with pytest.raises(ChunkFileError):
                read_chunk_file(path, KEY)


def test_a_codec_that_is_not_installed_here_is_no_damage(path: Path) -> None:
    forge(path, lambda header: header["__metadata__"].update(codec="zip"))
    with pytest.raises(MissingLibraryError, match="'zip' is not known here: install"):
        read_chunk_file(path, KEY)


def normal_kv(
    number: int, *, tokens: int = 5, layers: int = 3, dtype: torch.dtype = torch.bfloat16
) -> ChunkKV:
    """Numbers that every codec takes; key and value differ in head_dim."""
    generator = torch.Generator().manual_seed(number)
    heads = [
        torch.randn(2, tokens, dim, generator=generator).to(dtype)
        for _ in range(layers)
        for dim in (8, 12)
    ]
    return ChunkKV(tuple(LayerKV(*pair) for pair in zip(heads[::2], heads[1::2], strict=True)))


def test_a_file_holds_what_its_codec_keeps(path: Path, subtests: pytest.Subtests) -> None:
    for (name, codec), dtype in product(known_codecs().items(), DTYPES):
        with subtests.test(name, dtype=dtype):
            kv = normal_kv(1, dtype=dtype)
            kept = ChunkKV(
                tuple(
                    LayerKV(
                        *(
                            codec.decode(codec.encode(heads), dtype)
                            for heads in (layer.key, layer.value)
                        )
                    )
                    for layer in kv.layers
                )
            )
            data = write(path, kv, codec=codec)
            assert len(data) == encode_chunk(KEY, kv, codec).nbytes
            assert same_kv(read_chunk_file(path, KEY), kept)
            names = [
                f"layer.{layer:02d}.{heads}" for layer in range(3) for heads in ("key", "value")
            ]
            scales = [] if codec.name.startswith("raw") else [f"{name}.scale" for name in names]
            assert set(load_file(path)) == {*names, *scales}


def test_what_a_codec_refuses_is_written_as_it_is(path: Path, subtests: pytest.Subtests) -> None:
    for (name, codec), bad in product(known_codecs().items(), (float("nan"), float("inf"), 3e38)):
        with subtests.test(name, bad=bad):
            kv = normal_kv(1)
            kv.layers[1].value[0, 2, 3] = bad
            write(path, kv, codec=codec)
            assert same_kv(read_chunk_file(path, KEY), kv)


def test_layers_are_read_alone(path: Path, subtests: pytest.Subtests) -> None:
    """Damage behind a layer does not matter to it."""
    for name, codec in known_codecs().items():
        with subtests.test(name):
            kv = normal_kv(1)
            data = bytearray(write(path, kv, codec=codec))
            data[-1] ^= 1
            reader = open_chunk(BufferSource(np.frombuffer(data, dtype=np.uint8)), KEY)
            assert reader.layers == 3
            whole = decode_chunk(
                BufferSource(np.frombuffer(bytearray(encoded(kv, codec)), dtype=np.uint8)), KEY
            )
            assert same_kv(ChunkKV((reader.read(0), reader.read(1))), ChunkKV(whole.layers[:2]))
            with pytest.raises(ChunkFileError, match=r"layer\.02\.value"):
                reader.read(2)


def encoded(kv: ChunkKV, codec: Codec) -> bytes:
    return b"".join(encode_chunk(KEY, kv, codec).pieces())
