"""The format of one chunk's KV outside of memory, as the slower tiers keep it: safetensors, layer by layer.

Tensors are named ``layer.00.key``, ``layer.00.value``, ``layer.01.key`` … and lie in that order, so that a reader can
take one layer after another; before them, where the chunk has scores, ``scores.inter`` and ``scores.received``. The
metadata holds the format version, the chunk key, the rest of the scores as JSON, the xxh3_128 checksum of every
tensor's bytes, and one over everything else in the header. The checksums find damage, not forgery: whoever may write
the files may also write matching checksums. Nothing in a file is ever unpickled.

The header is written here rather than by ``safetensors.torch.save_file``, which orders tensors by name and refuses
tensors that share memory; and read here, because bytes that are read into memory of our own can be checked once and
then stay what they were, unlike a memory map's. Any safetensors reader can open the files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from kvlinker.chunk_scores import ChunkScores, Contextualization
from kvlinker.store.byte_source import ByteSource, FileSource
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.encryption import NOT_SEALED, SealedDataError, Sealing

Pieces = Iterable[memoryview]

FORMAT = "kvlinker-chunk"
FORMAT_VERSION = 2

_METADATA = "__metadata__"
_CHECKSUM = "xxh3_128"
_SCORES = "scores"
_SCORE_NAMES = ["scores.inter", "scores.received"]
_LENGTH_BYTES = 8
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ChunkFileError(Exception):
    """The file is not a whole, undamaged chunk file of the key that it was read for; the message says why."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a file: ``start`` and ``end`` count bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str


def encode_header(key: str, kv: ChunkKV) -> bytes:
    """All bytes that stand before the tensors. Raises ValueError for KV that the format does not have."""
    metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "key": key}
    header: dict[str, Any] = {_METADATA: metadata}
    if kv.scores is not None:
        metadata[_SCORES] = kv.scores.contextualization.to_json()
    offset = 0
    for name, tensor in _named_tensors(kv):
        expected = torch.float32 if name in _SCORE_NAMES else kv.layers[0].key.dtype
        if tensor.dtype not in _DTYPE_NAMES or tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype}; a chunk file holds one dtype out of {list(_DTYPE_NAMES)}.")
        if not tensor.numel():
            raise ValueError(f"{name} is empty; a chunk has at least one token.")
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        metadata[f"{_CHECKSUM}.{name}"] = xxhash.xxh3_128_hexdigest(_raw_bytes(tensor))
        offset += tensor.nbytes
    metadata[f"{_CHECKSUM}.header"] = xxhash.xxh3_128_hexdigest(_dump(header))
    text = _dump(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def encoded_pieces(header: bytes, kv: ChunkKV) -> Iterator[memoryview]:
    """All bytes of the encoded chunk, ``encode_header``'s first, as views of where they lie."""
    yield memoryview(header)
    for _, tensor in _named_tensors(kv):
        yield _raw_bytes(tensor)


def write_chunk_file(file: BinaryIO, header: bytes, kv: ChunkKV, seal: Callable[[Pieces], Pieces] = iter) -> None:
    """Write ``encode_header``'s bytes and the tensors, as what ``seal`` makes of them. Raises OSError."""
    for piece in seal(encoded_pieces(header, kv)):
        file.write(piece)


def read_chunk_file(path: Path, key: str, sealing: Sealing = NOT_SEALED) -> ChunkKV:
    """``decode_chunk`` of a file. Raises OSError, too."""
    with _opened(path) as file:
        return decode_chunk(FileSource(file), key, sealing)


def _opened(path: Path) -> BinaryIO:
    """A regular file, and nothing that could wait for others or never end. Raises ChunkFileError for anything else."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ChunkFileError("it is not a file") from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ChunkFileError("it is not a file")


def decode_chunk(source: ByteSource, key: str, sealing: Sealing = NOT_SEALED) -> ChunkKV:
    """Read and verify an encoded chunk that was sealed so; its tensors are views of what the source gives.

    Raises ChunkFileError for anything that is not exactly what was encoded for ``key``, and what the source raises.
    """
    try:
        plain = sealing.source(key, source)
        entries, start, contextualization = _read_header(plain, key)
        tensors = [_read_tensor(plain, start, entry) for entry in entries]
    except SealedDataError as error:
        raise ChunkFileError(str(error)) from error
    except EOFError as error:
        raise ChunkFileError("truncated while it was read") from error
    scores = None
    if contextualization is not None:
        inter, received, *tensors = tensors
        scores = ChunkScores(contextualization, inter.numpy(), received.numpy())
    return ChunkKV(tuple(LayerKV(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)), scores)


def _named_tensors(kv: ChunkKV) -> Iterator[tuple[str, torch.Tensor]]:
    if kv.scores is not None:
        arrays = (kv.scores.inter, kv.scores.received)
        yield from zip(_SCORE_NAMES, map(torch.from_numpy, arrays), strict=True)
    names = iter(_layer_names(len(kv.layers)))
    for layer in kv.layers:
        yield next(names), layer.key
        yield next(names), layer.value


def _layer_names(layers: int) -> list[str]:
    width = max(2, len(str(layers - 1)))
    return [f"layer.{index:0{width}d}.{part}" for index in range(layers) for part in ("key", "value")]


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data


def _dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _read_header(source: ByteSource, key: str) -> tuple[list[_Entry], int, Contextualization | None]:
    """Also returns where the tensors begin."""
    room = source.size - _LENGTH_BYTES
    length = int.from_bytes(source.read(0, _LENGTH_BYTES).data, "little") if room >= 0 else 0
    if length > room:
        raise ChunkFileError("truncated, or not a safetensors file")
    text = bytes(source.read(_LENGTH_BYTES, length).data)
    try:
        entries, contextualization = _parse_header(json.loads(text), key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkFileError(f"its header is not a chunk file's ({type(error).__name__}: {error})") from error
    start = _LENGTH_BYTES + length
    expected = start + entries[-1].end
    if source.size != expected:
        raise ChunkFileError(f"it has {source.size} bytes instead of {expected}")
    return entries, start, contextualization


def _parse_header(header: dict[str, Any], key: str) -> tuple[list[_Entry], Contextualization | None]:
    metadata = header[_METADATA]
    if (metadata["format"], metadata["version"]) != (FORMAT, str(FORMAT_VERSION)):
        raise ChunkFileError(
            f"it is of format {metadata['format']} {metadata['version']}, not {FORMAT} {FORMAT_VERSION}"
        )
    checksum = metadata.pop(f"{_CHECKSUM}.header")
    if xxhash.xxh3_128_hexdigest(_dump(header)) != checksum:
        raise ChunkFileError("its header does not match its checksum")
    if metadata["key"] != key:
        raise ChunkFileError(f"it holds chunk {metadata['key']}")
    del header[_METADATA]
    entries = []
    for name, fields in header.items():
        start, end = fields["data_offsets"]
        shape = tuple(fields["shape"])
        entries.append(_Entry(name, _DTYPES[fields["dtype"]], shape, start, end, metadata[f"{_CHECKSUM}.{name}"]))
    contextualization = Contextualization.from_json(metadata[_SCORES]) if _SCORES in metadata else None
    _check_layout(entries, with_scores=contextualization is not None)
    return entries, contextualization


def _check_layout(entries: list[_Entry], *, with_scores: bool) -> None:
    """Raises ValueError unless the tensors are all layers' keys and values of one chunk, end to end."""
    scores = entries[: len(_SCORE_NAMES)] if with_scores else []
    layers = entries[len(scores) :]
    if [entry.name for entry in scores] != (_SCORE_NAMES if with_scores else []):
        raise ValueError("the scores are not where they belong")
    if not layers or [entry.name for entry in layers] != _layer_names(len(layers) // 2):
        raise ValueError("the tensors are not layers in order")
    if any(len(entry.shape) != 3 for entry in layers):
        raise ValueError("a layer's tensor does not have three dimensions")
    tokens = layers[0].shape[1]
    if len({(entry.dtype, entry.shape[1]) for entry in layers}) != 1:
        raise ValueError("layers differ in dtype or number of tokens")
    if any(entry.dtype != torch.float32 or entry.shape != (tokens,) for entry in scores):
        raise ValueError("the scores are not one per token")
    offset = 0
    for entry in entries:
        if any(type(size) is not int or size < 1 for size in entry.shape) or entry.start != offset:
            raise ValueError(f"{entry.name} has an impossible shape or offset")
        offset += math.prod(entry.shape) * entry.dtype.itemsize
        if entry.end != offset:
            raise ValueError(f"{entry.name} has a size that is not its shape's")


def _read_tensor(source: ByteSource, start: int, entry: _Entry) -> torch.Tensor:
    """A view of what was read, in the entry's shape."""
    part = source.read(start + entry.start, entry.end - entry.start)
    if xxhash.xxh3_128_hexdigest(part.data) != entry.checksum:
        raise ChunkFileError(f"{entry.name} does not match its checksum")
    return torch.from_numpy(part).view(entry.dtype).reshape(entry.shape)
