"""Writes and reads one chunk's KV outside of memory, as the slower tiers keep it: safetensors,
layer by layer.

Tensors are named ``layer.00.key``, ``layer.00.value``, ``layer.01.key`` … and lie in that order, so
that a reader can take one layer after another; a codec's further parts follow each, as
``layer.00.key.scale``. Where the layer has an indexer, ``layer.00.index`` is after its value: what
the indexer keeps of the tokens. Before them, where the chunk has scores, lie ``scores.inter``,
``scores.received`` and, where it was measured, ``scores.sensitivity``; and where layers keep a
state, ``state.0000.mixed`` and so on, as they are under any codec. Where none has KV, there is no
more. The metadata holds the format version, the chunk key, the codec, the dtype of what it decodes,
the number of tokens where there is no KV, that of contexts where the KV is the mean over several,
the rest of the scores as JSON, the xxh3_128 checksum of every tensor's bytes, and one over
everything else in the header. The checksums find damage, not forgery: anybody who may write the
files may also write matching checksums. Nothing in a file is ever unpickled.

Where a tensor is compressed, its bytes lie there as one of uint8, and the metadata hold dtype and
shape of what they become. Its checksum is that of the compressed bytes: nothing is decompressed
before it is verified.

The header is written here rather than by ``safetensors.torch.save_file``, which orders tensors by
name and refuses tensors that share memory; and read here, because bytes that are read into memory
of our own can be checked once and then stay what they were, unlike a memory map's. Any safetensors
reader can open the files.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvlinker.base.system import OPEN_WITH_CARE
from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.store.chunk_kv import ChunkKV, ChunkState, LayerKV, LayerLostError
from kvlinker.store.format.byte_source import ByteSource, FileSource
from kvlinker.store.format.codecs import COMPRESSED_RAW, RAW, Codec
from kvlinker.store.format.compression import compressed, decompressed, require_zstd
from kvlinker.store.format.header import (
    SCORE_NAMES,
    ChunkFileError,
    Entry,
    Header,
    StoredTensor,
    checksum_of,
    compose_header,
    heads_names,
    kv_dtypes,
    layer_sizes,
    named_states,
    part_name,
    raw_bytes,
    read_header,
    states_of,
)
from kvlinker.store.format.sealing import NOT_SEALED, SealedDataError, Sealing
from kvlinker.store.lazy_torch import torch
from kvlinker.store.throttle import Rest, no_rest

Pieces = Iterable[memoryview]


@dataclass(frozen=True, slots=True)
class EncodedKV:
    """A chunk as it is stored."""

    header: bytes
    """All bytes before the tensors."""
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes, as views of where they lie."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            yield raw_bytes(tensor)


def encode_chunk(key: str, kv: ChunkKV, codec: Codec = RAW, rest: Rest = no_rest) -> EncodedKV:
    """Encode the chunk in the codec, or as it is where the codec refuses its numbers.

    ``rest`` is called between tensors. Raises ValueError for KV that the format does not have, and
    MissingLibraryError.
    """
    dtype = kv.layers[0].key.dtype if kv.layers else kv.states[0].mixed.dtype
    for name, heads in _named_heads(kv):
        if heads.dtype not in kv_dtypes().values() or heads.dtype != dtype:
            raise ValueError(
                f"{name} is {heads.dtype}; a chunk file holds one dtype out of {list(kv_dtypes())}."
            )
        if not heads.numel():
            raise ValueError(f"{name} is empty; a chunk has at least one token.")
    try:
        tensors = _encode(kv, codec, rest)
    except ValueError:
        codec = COMPRESSED_RAW if codec.compresses else RAW
        tensors = _encode(kv, codec, rest)
    contextualization = None if kv.scores is None else kv.scores.contextualization
    header = compose_header(
        key,
        tensors,
        codec=codec,
        dtype=dtype,
        tokens=kv.tokens,
        contexts=kv.contexts,
        contextualization=contextualization,
        rest=rest,
    )
    return EncodedKV(header, tuple(tensor.stored for tensor in tensors))


def write_chunk_file(
    file: BinaryIO,
    encoded: EncodedKV,
    seal: Callable[[Pieces], Pieces] = iter,
    rest: Rest = no_rest,
) -> None:
    """Write the encoded chunk, as what ``seal`` makes of it; ``rest`` is called between pieces.
    Raises OSError."""
    for piece in seal(encoded.pieces()):
        file.write(piece)
        rest()


def read_chunk_file(path: Path, key: str, sealing: Sealing = NOT_SEALED) -> ChunkKV:
    """Read and verify a chunk's file. Raises OSError, and what ``decode_chunk`` does."""
    with open_regular(path) as file:
        return decode_chunk(FileSource(file), key, sealing)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, and nothing that could wait for others or never end. Raises
    ChunkFileError for anything else."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | OPEN_WITH_CARE), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ChunkFileError("it is not a file") from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ChunkFileError("it is not a file")


def decode_chunk(source: ByteSource, key: str, sealing: Sealing = NOT_SEALED) -> ChunkKV:
    """Read and verify all of an encoded chunk. Raises the errors of ``open_chunk`` and its
    reader."""
    reader = open_chunk(source, key, sealing)
    layers = tuple(reader.read(layer) for layer in range(reader.layers))
    return ChunkKV(layers, reader.scores, reader.states, reader.tokens, reader.contexts)


def open_chunk(source: ByteSource, key: str, sealing: Sealing = NOT_SEALED) -> EncodedChunk:
    """Read and verify an encoded chunk's header and scores; its layers are left to be read one by
    one.

    Raises ChunkFileError for anything that is not exactly what was encoded for ``key``,
    UnreadableHereError for what cannot be read here, and what the source raises.
    """
    with _damage_errors():
        plain = sealing.source(key, source)
        header = read_header(plain, key)
        if any(entry.compressed for entry in header.entries):
            require_zstd()
        scores = None
        if header.contextualization is not None:
            arrays = (_read_tensor(plain, header.start, entry).numpy() for entry in header.scores)
            scores = ChunkScores(header.contextualization, *arrays)
        states = _read_states(plain, header)
        return EncodedChunk(plain, header, scores, states)


class EncodedChunk:
    """Reads an encoded chunk whose header and scores are verified. One thread at a time."""

    def __init__(
        self,
        source: ByteSource,
        header: Header,
        scores: ChunkScores | None,
        states: tuple[ChunkState, ...],
    ) -> None:
        self._source = source
        self._header = header
        self._parts = list(header.codec.layout(header.dtype))
        self._entries = header.layers
        mains = [entry.name for entry in self._entries[:: len(self._parts)]]
        ends = np.cumsum(layer_sizes(mains)).tolist()
        self._heads_of = [range(begin, end) for begin, end in pairwise([0, *ends])]
        self._room = _Room(len(mains))
        self.scores = scores
        self.states = states

    @property
    def layers(self) -> int:
        return len(self._heads_of)

    @property
    def tokens(self) -> int:
        """The number of tokens that the chunk has."""
        return self._header.tokens

    @property
    def contexts(self) -> int:
        """The number of contexts that it was computed in."""
        return self._header.contexts

    @property
    def nbytes(self) -> int:
        """The bytes of all layers, as they are encoded."""
        return self._entries[-1].end - self._entries[0].start if self._entries else 0

    def read(self, layer: int) -> LayerKV:
        """Read, verify and decode one layer; tensors that lie there as they are become views of
        what the source gives.

        Raises ChunkFileError if it is damaged, and what the source raises.
        """
        return LayerKV.of_parts([self._heads(index) for index in self._heads_of[layer]])

    def _heads(self, index: int) -> torch.Tensor:
        entries = self._entries[index * len(self._parts) : (index + 1) * len(self._parts)]
        with _damage_errors():
            tensors = [_read_tensor(self._source, self._header.start, entry) for entry in entries]
        parts = dict(zip(self._parts, tensors, strict=True))
        return self._header.codec.decode(parts, self._header.dtype, self._room)


class _Room:
    """Allocates tensors as ``codecs.Room`` does, for a known number of them: from one block of
    memory as long as they are as large as the first."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self._memory):
            # NumPy asks for huge pages, which makes fresh memory less than half as expensive as
            # torch.empty's.
            self._memory = torch.from_numpy(
                np.empty(max(1, self._tensors) * nbytes, dtype=np.uint8)
            )
        self._tensors -= 1
        tensor, self._memory = self._memory[:nbytes], self._memory[nbytes:]
        return tensor.view(dtype).view(shape)


@contextmanager
def _damage_errors() -> Iterator[None]:
    """Raise errors that indicate damage as ChunkFileError."""
    try:
        yield
    except SealedDataError as error:
        raise ChunkFileError(str(error)) from error
    except EOFError as error:
        raise ChunkFileError("truncated while it was read") from error


def _encode(kv: ChunkKV, codec: Codec, rest: Rest) -> list[StoredTensor]:
    """Return all tensors in order. Raises ValueError if the codec refuses."""
    tensors = []
    if kv.scores is not None:
        for name, array in zip(
            SCORE_NAMES, (kv.scores.inter, kv.scores.received, kv.scores.sensitivity), strict=True
        ):
            if array is not None:
                scores = torch.from_numpy(array)
                tensors.append(StoredTensor(name, scores, scores))
    for name, tensor in named_states(kv.states):
        tensors.append(StoredTensor(name, tensor, tensor))
        rest()
    for name, heads in _named_heads(kv):
        for part, tensor in codec.encode(heads).items():
            stored = compressed(tensor) if codec.compresses else None
            tensors.append(
                StoredTensor(part_name(name, part), tensor, tensor if stored is None else stored)
            )
            rest()
    return tensors


def _named_heads(kv: ChunkKV) -> Iterator[tuple[str, torch.Tensor]]:
    heads = (heads for layer in kv.layers for heads in layer.parts)
    return zip(heads_names([each.index is not None for each in kv.layers]), heads, strict=True)


def _read_tensor(source: ByteSource, start: int, entry: Entry) -> torch.Tensor:
    """Read and verify a tensor; where it is not compressed, it is a view of what was read."""
    part = source.read(start + entry.start, entry.end - entry.start)
    if checksum_of(part.data) != entry.checksum:
        raise ChunkFileError(f"{entry.name} does not match its checksum")
    if not entry.compressed:
        return torch.from_numpy(part).view(entry.dtype).reshape(entry.shape)
    try:
        return decompressed(part, entry.dtype, entry.shape)
    except ValueError as error:
        raise ChunkFileError(f"{entry.name} does not decompress: {error}") from error


def _read_states(source: ByteSource, header: Header) -> tuple[ChunkState, ...]:
    named = ((each.name, _read_tensor(source, header.start, each)) for each in header.states)
    try:
        return states_of(list(named))
    except ValueError as error:
        raise ChunkFileError(str(error)) from error


class TierReader:
    """Reads an encoded chunk in a tier, as a ``ChunkReader``."""

    def __init__(
        self,
        chunk: EncodedChunk,
        *,
        failed: Callable[[Exception], object],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a chunk. ``failed`` is called with the error of a read, and decides what
        happens to the copy."""
        self._chunk = chunk
        self._failed = failed
        self._close = close
        self.layers = chunk.layers
        self.tokens = chunk.tokens
        self.contexts = chunk.contexts
        self.nbytes = chunk.nbytes
        self.scores = chunk.scores
        self.states = chunk.states

    def read(self, layer: int) -> LayerKV:
        try:
            return self._chunk.read(layer)
        except LayerLostError:
            raise
        except Exception as error:
            self._failed(error)
            raise LayerLostError(str(error)) from error

    def close(self) -> None:
        self._close()
