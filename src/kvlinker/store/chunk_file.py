"""The format of one chunk's KV outside of memory, as the slower tiers keep it: safetensors, layer by layer.

Tensors are named ``layer.00.key``, ``layer.00.value``, ``layer.01.key`` … and lie in that order, so that a reader can
take one layer after another; a codec's further parts follow each, as ``layer.00.key.scale``. Before them, where the
chunk has scores, lie ``scores.inter`` and ``scores.received``. The metadata holds the format version, the chunk key,
the codec, the dtype of what it decodes, the rest of the scores as JSON, the xxh3_128 checksum of every tensor's bytes,
and one over everything else in the header. The checksums find damage, not forgery: whoever may write
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from kvlinker.chunk_scores import ChunkScores, Contextualization
from kvlinker.store.byte_source import ByteSource, FileSource
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.codecs import CODECS, RAW, Codec
from kvlinker.store.encryption import NOT_SEALED, SealedDataError, Sealing
from kvlinker.store.pacing import Rest, no_rest

Pieces = Iterable[memoryview]

FORMAT = "kvlinker-chunk"
FORMAT_VERSION = 3

_METADATA = "__metadata__"
_CHECKSUM = "xxh3_128"
_SCORES = "scores"
_SCORE_NAMES = ["scores.inter", "scores.received"]
_LENGTH_BYTES = 8
_CODEC = "codec"
_DTYPE = "dtype"
_KV_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DTYPES = _KV_DTYPES | {"I8": torch.int8, "U8": torch.uint8}
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


@dataclass(frozen=True, slots=True)
class _Header:
    """What the header says of the tensors, which begin at byte ``start``; the scores' come first, where there are."""

    entries: list[_Entry]
    start: int
    codec: Codec
    dtype: torch.dtype
    contextualization: Contextualization | None


@dataclass(frozen=True, slots=True)
class EncodedKV:
    """A chunk as it is stored: ``header`` are all bytes before the tensors."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def pieces(self) -> Iterator[memoryview]:
        """All bytes, as views of where they lie."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            yield _raw_bytes(tensor)


def encode_chunk(key: str, kv: ChunkKV, codec: Codec = RAW, rest: Rest = no_rest) -> EncodedKV:
    """The chunk in the codec, or as it is where the codec refuses its numbers.

    ``rest`` is called between tensors. Raises ValueError for KV that the format does not have.
    """
    dtype = kv.layers[0].key.dtype
    for name, heads in _named_heads(kv):
        if heads.dtype not in _KV_DTYPES.values() or heads.dtype != dtype:
            raise ValueError(f"{name} is {heads.dtype}; a chunk file holds one dtype out of {list(_KV_DTYPES)}.")
        if not heads.numel():
            raise ValueError(f"{name} is empty; a chunk has at least one token.")
    try:
        tensors = _encoded(kv, codec, rest)
    except ValueError:
        codec = RAW
        tensors = _encoded(kv, codec, rest)
    metadata = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "key": key,
        _CODEC: codec.name,
        _DTYPE: _DTYPE_NAMES[dtype],
    }
    header: dict[str, Any] = {_METADATA: metadata}
    if kv.scores is not None:
        metadata[_SCORES] = kv.scores.contextualization.to_json()
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        metadata[f"{_CHECKSUM}.{name}"] = xxhash.xxh3_128_hexdigest(_raw_bytes(tensor))
        offset += tensor.nbytes
        rest()
    metadata[f"{_CHECKSUM}.header"] = xxhash.xxh3_128_hexdigest(_dump(header))
    text = _dump(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return EncodedKV(len(text).to_bytes(_LENGTH_BYTES, "little") + text, tuple(tensors.values()))


def write_chunk_file(
    file: BinaryIO, encoded: EncodedKV, seal: Callable[[Pieces], Pieces] = iter, rest: Rest = no_rest
) -> None:
    """Write the encoded chunk, as what ``seal`` makes of it; ``rest`` is called between pieces. Raises OSError."""
    for piece in seal(encoded.pieces()):
        file.write(piece)
        rest()


def read_chunk_file(path: Path, key: str, sealing: Sealing = NOT_SEALED) -> ChunkKV:
    """``decode_chunk`` of a file. Raises OSError, too."""
    with open_regular(path) as file:
        return decode_chunk(FileSource(file), key, sealing)


def open_regular(path: Path) -> BinaryIO:
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
    """All of ``open_chunk``; raises what it and its reader do."""
    reader = open_chunk(source, key, sealing)
    return ChunkKV(tuple(reader.read(layer) for layer in range(reader.layers)), reader.scores)


def open_chunk(source: ByteSource, key: str, sealing: Sealing = NOT_SEALED) -> EncodedChunk:
    """Read and verify an encoded chunk's header and scores; its layers are left to be read one by one.

    Raises ChunkFileError for anything that is not exactly what was encoded for ``key``, and what the source raises.
    """
    with _what_is_wrong():
        plain = sealing.source(key, source)
        header = _read_header(plain, key)
        scores = None
        if header.contextualization is not None:
            inter, received = (
                _read_tensor(plain, header.start, entry) for entry in header.entries[: len(_SCORE_NAMES)]
            )
            scores = ChunkScores(header.contextualization, inter.numpy(), received.numpy())
        return EncodedChunk(plain, header, scores)


class EncodedChunk:
    """An encoded chunk whose header and scores are verified. One thread at a time."""

    def __init__(self, source: ByteSource, header: _Header, scores: ChunkScores | None) -> None:
        self._source = source
        self._header = header
        self._parts = list(header.codec.layout(header.dtype))
        self._entries = header.entries[0 if scores is None else len(_SCORE_NAMES) :]
        self._room = _Room(2 * self.layers)
        self.scores = scores

    @property
    def layers(self) -> int:
        return len(self._entries) // (2 * len(self._parts))

    @property
    def nbytes(self) -> int:
        """Of all layers, as they are encoded."""
        return self._entries[-1].end - self._entries[0].start

    def read(self, layer: int) -> LayerKV:
        """Read, verify and decode one layer; tensors that lie there as they are become views of what the source gives.

        Raises ChunkFileError where it is damaged, and what the source raises.
        """
        return LayerKV(self._heads(2 * layer), self._heads(2 * layer + 1))

    def _heads(self, index: int) -> torch.Tensor:
        entries = self._entries[index * len(self._parts) : (index + 1) * len(self._parts)]
        with _what_is_wrong():
            tensors = [_read_tensor(self._source, self._header.start, entry) for entry in entries]
        parts = dict(zip(self._parts, tensors, strict=True))
        return self._header.codec.decode(parts, self._header.dtype, self._room)


class _Room:
    """``codecs.Room`` for a known number of tensors, out of one piece of memory as long as they are as large as the
    first."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._memory):
            # NumPy asks for huge pages, which makes fresh memory less than half as expensive as torch.empty's.
            self._memory = torch.from_numpy(np.empty(max(1, self._tensors) * nbytes, dtype=np.uint8))
        self._tensors -= 1
        tensor, self._memory = self._memory[:nbytes], self._memory[nbytes:]
        return tensor.view(dtype).view(shape)


@contextmanager
def _what_is_wrong() -> Iterator[None]:
    """What tells of damage becomes a ChunkFileError."""
    try:
        yield
    except SealedDataError as error:
        raise ChunkFileError(str(error)) from error
    except EOFError as error:
        raise ChunkFileError("truncated while it was read") from error


def _encoded(kv: ChunkKV, codec: Codec, rest: Rest) -> dict[str, torch.Tensor]:
    """All tensors in order. Raises ValueError where the codec refuses."""
    tensors: dict[str, torch.Tensor] = {}
    if kv.scores is not None:
        arrays = (kv.scores.inter, kv.scores.received)
        tensors.update(zip(_SCORE_NAMES, map(torch.from_numpy, arrays), strict=True))
    for name, heads in _named_heads(kv):
        for part, tensor in codec.encode(heads).items():
            tensors[_part_name(name, part)] = tensor
        rest()
    return tensors


def _named_heads(kv: ChunkKV) -> Iterator[tuple[str, torch.Tensor]]:
    heads = (heads for layer in kv.layers for heads in (layer.key, layer.value))
    return zip(_heads_names(len(kv.layers)), heads, strict=True)


def _heads_names(layers: int) -> list[str]:
    width = max(2, len(str(layers - 1)))
    return [f"layer.{index:0{width}d}.{part}" for index in range(layers) for part in ("key", "value")]


def _part_name(heads: str, part: str) -> str:
    return f"{heads}.{part}" if part else heads


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data


def _dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _read_header(source: ByteSource, key: str) -> _Header:
    room = source.size - _LENGTH_BYTES
    length = int.from_bytes(source.read(0, _LENGTH_BYTES).data, "little") if room >= 0 else 0
    if length > room:
        raise ChunkFileError("truncated, or not a safetensors file")
    text = bytes(source.read(_LENGTH_BYTES, length).data)
    try:
        header = _parse_header(json.loads(text), key, start=_LENGTH_BYTES + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkFileError(f"its header is not a chunk file's ({type(error).__name__}: {error})") from error
    expected = header.start + header.entries[-1].end
    if source.size != expected:
        raise ChunkFileError(f"it has {source.size} bytes instead of {expected}")
    return header


def _parse_header(header: dict[str, Any], key: str, *, start: int) -> _Header:
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
        begin, end = fields["data_offsets"]
        shape = tuple(fields["shape"])
        entries.append(_Entry(name, _DTYPES[fields["dtype"]], shape, begin, end, metadata[f"{_CHECKSUM}.{name}"]))
    contextualization = Contextualization.from_json(metadata[_SCORES]) if _SCORES in metadata else None
    parsed = _Header(entries, start, CODECS[metadata[_CODEC]], _KV_DTYPES[metadata[_DTYPE]], contextualization)
    _check_layout(parsed)
    return parsed


def _check_layout(header: _Header) -> None:
    """Raises ValueError unless the tensors are all layers' keys and values of one chunk, end to end."""
    entries = header.entries
    score_names = [] if header.contextualization is None else _SCORE_NAMES
    scores, layers = entries[: len(score_names)], entries[len(score_names) :]
    if [entry.name for entry in scores] != score_names:
        raise ValueError("the scores are not where they belong")
    parts = header.codec.layout(header.dtype)
    names = _heads_names(len(layers) // (2 * len(parts)))
    if not names or [entry.name for entry in layers] != [_part_name(name, part) for name in names for part in parts]:
        raise ValueError("the tensors are not layers in order")
    tokens = layers[0].shape[1:2]
    for index in range(0, len(layers), len(parts)):
        main = layers[index]
        for entry, (dtype, dimensions) in zip(layers[index : index + len(parts)], parts.values(), strict=True):
            if entry.dtype != dtype or len(entry.shape) != dimensions:
                raise ValueError(f"{entry.name} is not what the codec {header.codec.name} makes of {header.dtype}")
            if entry.shape[:2] != main.shape[:1] + tokens:
                raise ValueError("a layer's tensors differ in heads or tokens")
    if any(entry.dtype != torch.float32 or entry.shape != tokens for entry in scores):
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
