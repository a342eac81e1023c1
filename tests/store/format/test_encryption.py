"""Encryption at rest: what is stored can be read with the key alone, and whatever was changed reads
as damage."""

from __future__ import annotations

import base64
import itertools
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from kvlinker.base.events import ChunkDamaged
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.store import (
    Catalog,
    ContextCache,
    DiskTier,
    StoreError,
    load_cipher,
    new_context_cache_id,
)
from kvlinker.store.format import encryption as module
from kvlinker.store.format.byte_source import BufferSource
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.format.sealing import NOT_SEALED, SealedDataError, Sealing, sealing_of
from kvlinker.store.remote.blob_tier import BlobTier
from kvlinker.store.remote.objects import object_tier
from tests.properties import examples
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv

pytest.importorskip("cryptography")

KEY = bytes(range(32))
OTHER = bytes(32)
BLOCK = 64
NOW = 1000.0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


def sealed(
    plain: bytes, key: str = key_of(1), *, cuts: tuple[int, ...] = (), cipher: bytes = KEY
) -> bytearray:
    """``plain`` in pieces, cut at these places."""
    edges = [0, *sorted(cut % (len(plain) + 1) for cut in cuts), len(plain)]
    pieces = [memoryview(plain[begin:end]) for begin, end in itertools.pairwise(edges)]
    sealing = sealing_of(Cipher(cipher))
    data = bytearray(b"".join(sealing.pieces(key, len(plain), pieces)))
    assert len(data) == sealing.nbytes(len(plain))
    return data


def source_of(data: bytes | bytearray, key: str = key_of(1), cipher: bytes = KEY):
    return sealing_of(Cipher(cipher)).source(
        key, BufferSource(np.frombuffer(bytes(data), dtype=np.uint8))
    )


@examples(100)
@given(
    size=st.integers(0, 5 * BLOCK),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
    reads=st.lists(st.tuples(st.integers(0, 5 * BLOCK), st.integers(0, 5 * BLOCK)), max_size=8),
)
def test_any_part_can_be_read_in_any_order(
    size: int, cuts: list[int], reads: list[tuple[int, int]]
) -> None:
    plain = os.urandom(size)
    source = source_of(sealed(plain, cuts=tuple(cuts)))
    assert source.size == size
    for offset, length in reads:
        if offset + length <= size:
            assert source.read(offset, length).tobytes() == plain[offset : offset + length]
        else:
            with pytest.raises(EOFError):
                source.read(offset, length)


def read_all(data: bytes | bytearray, key: str = key_of(1), cipher: bytes = KEY) -> bytes:
    source = source_of(data, key, cipher)
    return source.read(0, source.size).tobytes()


def test_no_changed_byte_and_no_truncation_goes_unnoticed() -> None:
    plain = os.urandom(3 * BLOCK + 5)
    data = sealed(plain)
    assert plain[:16] not in data
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1
        with pytest.raises(SealedDataError):
            read_all(changed)
    cuts: list[bytes | bytearray] = [data[:size] for size in range(len(data))]
    for cut in (*cuts, data + b"\0", data[: -BLOCK - 16], b"", plain):
        with pytest.raises(SealedDataError):
            read_all(cut)


def test_blocks_files_and_keys_cannot_be_exchanged() -> None:
    plain = os.urandom(3 * BLOCK)
    data = sealed(plain)
    size = BLOCK + 16
    start = len(data) - 3 * size
    first, second = data[start : start + size], data[start + size : start + 2 * size]
    for forged in (
        data[:start] + second + first + data[start + 2 * size :],
        data[:start] + sealed(plain)[start:],
    ):
        with pytest.raises(SealedDataError):
            read_all(forged)
    for key, cipher in ((key_of(2), KEY), (key_of(1), OTHER)):
        with pytest.raises(SealedDataError):
            read_all(data, key, cipher)
    assert read_all(data) == plain
    assert sealed(plain) != data, "the same content twice looks different"


def test_records_open_in_their_place_only() -> None:
    cipher = Cipher(KEY)
    record = cipher.seal(b"secret", b"here")
    assert cipher.open(record, b"here") == b"secret"
    assert record != cipher.seal(b"secret", b"here")
    for sealed_record, place, key in (
        (record, b"there", KEY),
        (record, b"here", OTHER),
        (record[:-1], b"here", KEY),
        (b"", b"here", KEY),
        (record[:5], b"here", KEY),
    ):
        with pytest.raises(SealedDataError):
            Cipher(key).open(sealed_record, place)


@pytest.mark.parametrize(
    "text", [KEY.hex(), base64.b64encode(KEY).decode(), f" {KEY.hex().upper()}\n"]
)
def test_keys_in_hex_and_base64(text: str) -> None:
    cipher = load_cipher(SecretStr(text))
    assert cipher is not None
    assert cipher.open(Cipher(KEY).seal(b"a", b""), b"") == b"a"


@pytest.mark.parametrize(
    "text", ["", "secret", KEY.hex()[:-2], base64.b64encode(KEY[:-1]).decode(), "ü" * 44]
)
def test_bad_keys_are_told_but_not_shown(text: str) -> None:
    with pytest.raises(StoreError, match=r"KVLINKER_ENCRYPTION_KEY .*openssl rand") as caught:
        load_cipher(SecretStr(text))
    assert not text or text not in str(caught.value)


def test_no_key_is_no_cipher() -> None:
    assert load_cipher(None) is None
    assert NOT_SEALED.nbytes(5) == 5


def test_the_disk_tier_keeps_no_plain_bytes(tmp_path: Path) -> None:
    recorder = Recorder()

    def tier(sealing: Sealing) -> DiskTier:
        return DiskTier(tmp_path, 1 << 20, recorder.events, sealing=sealing)

    kv = chunk_kv(1)
    encrypted = tier(sealing_of(Cipher(KEY)))
    assert encrypted.put(key_of(1), kv)
    (file,) = tmp_path.rglob("*.safetensors")
    assert encrypted.used_bytes == file.stat().st_size
    data = file.read_bytes()
    raw = kv.layers[0].key.view(torch.uint8).numpy().tobytes()
    assert raw not in data
    assert key_of(1).encode() not in data
    found = tier(sealing_of(Cipher(KEY))).get(key_of(1))
    assert found is not None
    assert same_kv(found, kv)
    assert encrypted.check().damaged == ()
    other = tmp_path / key_of(2)[:2]
    other.mkdir(exist_ok=True)
    file.rename(other / f"{key_of(2)}.safetensors")
    assert tier(sealing_of(Cipher(KEY))).get(key_of(2)) is None
    assert len(recorder.of(ChunkDamaged)) == 1
    for wrong in (sealing_of(Cipher(OTHER)), NOT_SEALED):
        assert encrypted.put(key_of(3), kv)
        assert tier(wrong).get(key_of(3)) is None
        encrypted.delete(key_of(3))
    assert len(recorder.of(ChunkDamaged)) == 3


def test_a_shared_tier_keeps_no_plain_bytes(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    recorder = Recorder()
    kv = chunk_kv(1)

    def tier(cipher: bytes) -> BlobTier:
        return object_tier(f"file://{tmp_path}", 1 << 20, recorder.events, cipher=Cipher(cipher))

    first, second, stranger = tier(KEY), tier(KEY), tier(OTHER)
    assert first.put(key_of(1), kv)
    (file,) = tmp_path.rglob("*.safetensors")
    assert first.used_bytes == file.stat().st_size
    assert kv.layers[0].key.view(torch.uint8).numpy().tobytes() not in file.read_bytes()
    found = second.get(key_of(1))
    assert found is not None
    assert same_kv(found, kv)
    assert stranger.get(key_of(1)) is None
    assert len(recorder.of(ChunkDamaged)) == 1
    for each in (first, second, stranger):
        each.close()


def record(tokens: tuple[int, ...]) -> ContextCache:
    chunk = Chunk(tokens=tokens, prefix=tokens[::-1])
    return ContextCache(
        id=new_context_cache_id(),
        tenant="anna",
        model="tiny",
        fingerprint="weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="weights", tenant="anna"),
        created_at=NOW,
    )


SECRET = tuple(range(1_000_000, 1_000_100))


def on_disk(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


def secret_bytes() -> tuple[bytes, bytes]:
    return np.asarray(SECRET[:9], dtype="<u4").tobytes(), np.asarray(
        SECRET[:-10:-1], dtype="<u4"
    ).tobytes()


@pytest.mark.parametrize("later", [False, True])
def test_the_catalog_keeps_no_plain_token_ids(tmp_path: Path, later: bool) -> None:
    path = tmp_path / "catalog.sqlite"
    added = record(SECRET)
    if later:
        plain = Catalog(path)
        plain.add([added])
        assert all(part in on_disk(path) for part in secret_bytes())
        plain.close()
    catalog = Catalog(path, Cipher(KEY))
    if not later:
        catalog.add([added])
    assert catalog.get(added.id, "anna", NOW) == added
    assert not any(part in on_disk(path) for part in secret_bytes())
    catalog.close()
    for cipher, message in (
        (None, "is encrypted. Give its key"),
        (Cipher(OTHER), "is not the key"),
    ):
        with pytest.raises(StoreError, match=message):
            Catalog(path, cipher)
    again = Catalog(path, Cipher(KEY))
    assert again.list("anna", NOW, limit=1).items == (added,)
    again.close()


def test_what_texts_mean_does_not_stay_in_plain(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    plain, added = Catalog(path), record(SECRET)
    plain.add([added])
    plain.search.add({added.chunk_key: "the formula"})
    vector = np.linspace(0.1, 0.2, 32, dtype=np.float32)
    plain.vectors.add("embedder", {added.chunk_key: vector})
    plain.close()
    assert vector.tobytes() in on_disk(path)
    Catalog(path, Cipher(KEY)).close()
    assert b"formula" not in on_disk(path)
    assert vector.tobytes() not in on_disk(path)


def test_exchanged_entries_of_the_catalog_are_found(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    catalog = Catalog(path, Cipher(KEY))
    first, second = record((1, 2)), record((3, 4))
    catalog.add([first, second])
    with sqlite3.connect(path) as raw:
        (tokens,) = raw.execute(
            "SELECT tokens FROM chunks WHERE key = ?", (second.chunk_key,)
        ).fetchone()
        raw.execute("UPDATE chunks SET tokens = ? WHERE key = ?", (tokens, first.chunk_key))
    raw.close()
    with pytest.raises(StoreError, match="changed from outside"):
        catalog.get(first.id, "anna", NOW)
    assert catalog.get(second.id, "anna", NOW) == second
    catalog.close()


def test_deleted_token_ids_do_not_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    catalog = Catalog(path)
    added = record(SECRET)
    catalog.add([added])
    catalog.delete(added.id, "anna", NOW)
    catalog.close()  # what was deleted also leaves the write-ahead log
    assert not any(part in on_disk(path) for part in secret_bytes())
