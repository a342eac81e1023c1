"""Compressed tensors: what comes back, what is not worth it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from kvlinker.base.events import ChunkDamaged
from kvlinker.base.installing import install_command
from kvlinker.store import ChunkKV, DiskTier, LayerKV, StoreError
from kvlinker.store.format import compression
from kvlinker.store.format.byte_source import BufferSource, Bytes
from kvlinker.store.format.chunk_file import decode_chunk, encode_chunk, open_chunk
from kvlinker.store.format.codecs import find_codec, known_codecs
from kvlinker.store.format.compression import MOST_EXPANSION, compressed, decompressed
from kvlinker.store.format.header import ChunkFileError
from kvlinker.store.remote.objects import object_tier
from kvlinker.store.tiers.base import Tier
from tests.properties import examples
from tests.store.store_chunks import Recorder, key_of, same_kv

KEY = key_of(1)
COMPRESSING = [name for name, codec in known_codecs().items() if codec.compresses]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8]


def even(
    shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> torch.Tensor:
    """Few different numbers: they compress, but not too well."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 20, shape, generator=generator).to(dtype)


def buffer(data: bytes | bytearray) -> Bytes:
    return np.frombuffer(bytearray(data), dtype=np.uint8)


@examples(150)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_every_bit_comes_back(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    tensor = even(tuple(shape), dtype, seed)
    small = compressed(tensor)
    if small is not None:
        assert small.dtype == torch.uint8
        assert small.nbytes < tensor.nbytes <= MOST_EXPANSION * small.nbytes
        back = decompressed(small.numpy(), dtype, tuple(shape))
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    else:
        assert tensor.nbytes < 256, "only of small tensors nothing is gained"


def test_bytes_of_one_significance_come_together() -> None:
    """The noise of low bytes does not hide that the high ones are alike."""
    generator = torch.Generator().manual_seed(0)
    numbers = 1 + torch.rand(4, 512, 32, generator=generator)
    small = compressed(numbers)
    assert small is not None
    plain = len(
        zstandard.ZstdCompressor(level=compression.LEVEL).compress(numbers.numpy().tobytes())
    )
    assert small.nbytes < 0.9 * plain


def test_what_gains_nothing_is_left_alone() -> None:
    noise = torch.randint(
        0, 256, (4, 100, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert compressed(noise) is None


def test_what_would_claim_much_memory_is_left_alone() -> None:
    assert compressed(torch.zeros(4, 1000, 64)) is None


GOOD = even((4, 50, 8))


def test_what_is_not_exactly_the_tensor_is_refused(subtests: pytest.Subtests) -> None:
    compress = zstandard.ZstdCompressor().compress
    no_tensors = {
        "too much": compress(bytes(GOOD.nbytes + 1)),
        "a bomb": compress(bytes(1 << 30)),
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(GOOD.nbytes)),
        "more behind": compress(bytes(GOOD.nbytes)) + b"more",
        "cut": compress(bytes(GOOD.nbytes))[:-1],
        "no frame": b"\x28\xb5\x2f\xfd" + bytes(60),
        "nothing": b"",
        "garbage": b"something else",
    }
    for name, data in no_tensors.items():
        with (
            subtests.test(name),
            pytest.raises(ValueError),  # noqa: PT011 - the library words most of them
        ):
            decompressed(buffer(data), GOOD.dtype, tuple(GOOD.shape))


def test_a_frame_that_asks_for_much_memory_is_refused() -> None:
    """A window of 2 GiB for a few bytes: content size and all else are right."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, strategy=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    endless = compressor.compress(bytes(GOOD.nbytes)) + compressor.flush()
    assert zstandard.get_frame_parameters(endless).window_size == 1 << 27
    with mock.patch.object(zstandard, "get_frame_parameters") as parsed:
        parsed.return_value.content_size = GOOD.nbytes
        parsed.return_value.window_size = 1 << 27
        with pytest.raises(ValueError, match="asks for 134217728 bytes"):
            decompressed(buffer(endless), GOOD.dtype, tuple(GOOD.shape))


# --- in chunk files


def compressible(*, tokens: int = 40, layers: int = 3) -> ChunkKV:
    return ChunkKV(
        tuple(
            LayerKV(even((2, tokens, 8), seed=2 * i), even((2, tokens, 12), seed=2 * i + 1))
            for i in range(layers)
        )
    )


def encoded(kv: ChunkKV, codec: str) -> bytearray:
    return bytearray(b"".join(encode_chunk(KEY, kv, find_codec(codec)).pieces()))


def decoded(data: bytes | bytearray) -> ChunkKV:
    return decode_chunk(BufferSource(buffer(data)), KEY)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_compressed_files_hold_the_same_in_less(codec: str) -> None:
    kv = compressible(tokens=400)
    small, large = encoded(kv, codec), encoded(kv, codec.removesuffix("+zstd"))
    assert len(small) < 0.9 * len(large)
    assert same_kv(decoded(small), decoded(large))
    assert all(
        tensor.dtype == torch.uint8
        for name, tensor in load(bytes(small)).items()
        if name.startswith("layer")
    )


def test_files_of_which_nothing_is_compressed_are_as_ever() -> None:
    def version(data: bytes | bytearray) -> str:
        return str(
            json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["version"]
        )

    noise = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0)).view(torch.uint8)
    noisy = ChunkKV((LayerKV(*(noise.view(torch.float32),) * 2),))
    assert [version(encoded(kv, "int8+zstd")) for kv in (noisy, compressible())] == ["3", "4"]


def test_layers_are_read_alone() -> None:
    kv = compressible()
    data = encoded(kv, "raw+zstd")
    data[-1] ^= 1
    reader = open_chunk(BufferSource(buffer(data)), KEY)
    assert same_kv(ChunkKV((reader.read(0), reader.read(1))), ChunkKV(kv.layers[:2]))
    with (
        mock.patch("kvlinker.store.format.chunk_file.decompressed") as untouched,
        pytest.raises(ChunkFileError),
    ):
        reader.read(2)
    assert untouched.call_count == 1, (
        "the key is sound; the value is not decompressed before it is verified"
    )


def test_no_changed_byte_goes_unnoticed() -> None:
    kv = compressible(tokens=20, layers=1)
    data = encoded(kv, "raw+zstd")
    unnoticed = 0
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        try:
            assert same_kv(decoded(changed), kv)
            unnoticed += 1
        except ChunkFileError:
            pass
    assert unnoticed < 8, "white space behind the header's JSON carries nothing"


def forged(change: Callable[[dict[str, str]], object], codec: str = "raw+zstd") -> bytes:
    """A file with right checksums whose metadata were changed."""
    data = encoded(compressible(tokens=400), codec)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    del metadata["xxh3_128.header"]
    change(metadata)
    text = json.dumps(header, separators=(",", ":")).encode()
    metadata["xxh3_128.header"] = xxhash.xxh3_128_hexdigest(text)
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


FIRST = "plain.layer.00.key"


FORGERIES: list[Callable[[dict[str, str]], object]] = [
    lambda m: m.update(
        {name: '["BF16", 2, 400000000, 8]' for name in m if name.startswith("plain")}
    ),
    lambda m: m.update({FIRST: '["BF16", 2, 400, 800000000]'}),
    lambda m: m.update({FIRST: '["BF16", 2, 400, 9]'}),
    lambda m: m.update({FIRST: '["F16", 2, 400, 8]'}),
    lambda m: m.update({FIRST: '["BF16", 2, 400]'}),
    lambda m: m.update({FIRST: "[]"}),
    lambda m: m.update({FIRST: "{"}),
    lambda m: m.pop(FIRST),
    lambda m: m.update(codec="raw"),
    lambda m: m.update(codec="int8+zstd"),
]


def test_forged_sizes_are_refused(subtests: pytest.Subtests) -> None:
    assert same_kv(decoded(forged(lambda m: None)), compressible(tokens=400))
    for number, change in enumerate(FORGERIES):
        with subtests.test(number=number), pytest.raises(ChunkFileError):
            decoded(forged(change))


# --- without the library


@pytest.fixture
def without_zstd() -> Callable[[], object]:
    def missing() -> None:
        raise compression.MissingLibraryError(
            f"zstandard is missing: install it with  {install_command('zstd')}"
        )

    return lambda: mock.patch.object(compression, "_zstandard", missing)


def test_the_codec_says_what_is_missing(without_zstd) -> None:
    with (
        without_zstd(),
        pytest.raises(StoreError, match=r"int8\+zstd cannot be used: .*\[zstd\]"),
    ):
        find_codec("int8+zstd")


@pytest.mark.parametrize("kind", ["disk", "object"])
def test_what_cannot_be_read_here_is_a_miss_and_stays(
    kind: str, tmp_path: Path, without_zstd, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    codec, kv = find_codec("raw+zstd"), compressible()
    tier: Tier
    if kind == "disk":
        tier = DiskTier(tmp_path, 1 << 20, recorder.events, codec=codec)
    else:
        tier = object_tier(f"file://{tmp_path}", 1 << 20, recorder.events, codec=codec)
    assert tier.put(KEY, kv)
    with without_zstd():
        assert tier.get(KEY) is None
        assert tier.open(KEY) is None
        assert tier.check().damaged == ()
    assert install_command("zstd") in caplog.text
    back = tier.get(KEY)
    assert back is not None
    assert same_kv(back, kv)
    assert recorder.of(ChunkDamaged) == []
    tier.close()
