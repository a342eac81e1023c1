"""Writes and reads the header of a chunk file. Reading trusts only the header.

The first eight bytes are the length of the JSON that follows, as in any safetensors file. The only
caller, ``store.format.chunk_file``, documents the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import xxhash

from kvlinker.base.types.chunk_scores import Contextualization
from kvlinker.store.chunk_kv import ChunkState
from kvlinker.store.format.byte_source import ByteSource
from kvlinker.store.format.codecs import Codec, known_codecs
from kvlinker.store.format.compression import (
    MOST_EXPANSION,
    MissingLibraryError,
    UnreadableHereError,
)
from kvlinker.store.lazy_torch import torch
from kvlinker.store.throttle import Rest, no_rest

FORMAT = "kvlinker-chunk"
FORMAT_VERSION = 3
"""The version of plain files. A change of the format takes the next number."""

COMPRESSED_VERSION = 4
"""The version of files with compressed tensors; everything else is as in version 3."""

STATES_VERSION = 5
"""The version of files with states, compressed or not."""

INDEX_VERSION = 6
"""The version of files with what indexers keep, with states or not."""

STATES_ALONE_VERSION = 7
"""The version of files with states and no KV, which say how many tokens the chunk has.

Later versions keep the header's checksum, by which this one distinguishes a newer file, which it
leaves alone, from a damaged one, which it drops.
"""

SCORE_NAMES = ("scores.inter", "scores.received", "scores.sensitivity")
"""The names of the scores' tensors. The last one is missing where it was not measured."""

LAYER = "layer."
"""How the names of the layers' tensors begin."""

_METADATA = "__metadata__"
_CHECKSUM = "xxh3_128"
_PLAIN = "plain"
_SCORES = "scores"
_CODEC = "codec"
PREFIX = "state."
"""The beginning of the names of tensors of layers with a state."""

_MIXED, _GATE, _FACTOR, _OFFSET, _INNER = "mixed", "gate", "factor", "offset", "inner"
_DTYPE = "dtype"
_TOKENS = "tokens"
_CONTEXTS = "contexts"
_KEY, _VALUE, _INDEX = "key", "value", "index"
_LENGTH_BYTES = 8


@cache
def kv_dtypes() -> Mapping[str, torch.dtype]:
    """Return the dtypes of KV, by their names in files."""
    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@cache
def _dtypes() -> Mapping[str, torch.dtype]:
    return {**kv_dtypes(), "I8": torch.int8, "U8": torch.uint8}


@cache
def _dtype_names() -> Mapping[torch.dtype, str]:
    return {dtype: name for name, dtype in _dtypes().items()}


class ChunkFileError(Exception):
    """Raised when a file is not a whole, undamaged chunk file of the key that it was read for; the
    message says why."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to be written."""

    name: str
    tensor: torch.Tensor
    stored: torch.Tensor
    """``tensor`` itself, or its bytes compressed."""

    @property
    def compressed(self) -> bool:
        return self.stored is not self.tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file as the header describes it. ``start`` and ``end`` count bytes from the end
    of the header; ``checksum`` is that of the bytes between them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str
    compressed: bool


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and verified header. The tensors begin at byte ``start``; the scores' and states',
    if there are any, come first."""

    entries: list[Entry]
    start: int
    codec: Codec
    dtype: torch.dtype
    contextualization: Contextualization | None

    tokens: int
    """The number of tokens that the chunk has."""

    contexts: int
    """The number of contexts that it was computed in."""

    @property
    def scores(self) -> list[Entry]:
        """The scores' tensors."""
        return [entry for entry in self.entries[: len(SCORE_NAMES)] if entry.name in SCORE_NAMES]

    @property
    def states(self) -> list[Entry]:
        """The states' tensors."""
        return [entry for entry in self.entries if entry.name.startswith(PREFIX)]

    @property
    def layers(self) -> list[Entry]:
        """The layers' tensors."""
        return self.entries[len(self.scores) + len(self.states) :]


def compose_header(
    key: str,
    tensors: Sequence[StoredTensor],
    *,
    codec: Codec,
    dtype: torch.dtype,
    tokens: int,
    contexts: int,
    contextualization: Contextualization | None,
    rest: Rest = no_rest,
) -> bytes:
    """Return all bytes before the tensors, which follow one another; ``rest`` is called between
    these. ``tokens`` is the number of tokens that the chunk has, ``contexts`` that of the contexts
    that it was computed in."""
    version = FORMAT_VERSION
    if any(tensor.compressed for tensor in tensors):
        version = COMPRESSED_VERSION
    if any(tensor.name.startswith(PREFIX) for tensor in tensors):
        version = STATES_VERSION
    if any(_is_of_index(tensor.name) for tensor in tensors):
        version = INDEX_VERSION
    has_kv = any(tensor.name.startswith(LAYER) for tensor in tensors)
    metadata = {
        "format": FORMAT,
        "version": str(version if has_kv else STATES_ALONE_VERSION),
        "key": key,
        _CODEC: codec.name,
        _DTYPE: _dtype_names()[dtype],
    }
    if not has_kv:
        metadata[_TOKENS] = str(tokens)
    if contexts > 1:
        metadata[_CONTEXTS] = str(contexts)
    header: dict[str, Any] = {_METADATA: metadata}
    if contextualization is not None:
        metadata[_SCORES] = contextualization.to_json()
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _dtype_names()[tensor.stored.dtype],
            "shape": list(tensor.stored.shape),
            "data_offsets": [offset, offset + tensor.stored.nbytes],
        }
        if tensor.compressed:
            plain = [_dtype_names()[tensor.tensor.dtype], *tensor.tensor.shape]
            metadata[f"{_PLAIN}.{tensor.name}"] = json.dumps(plain)
        metadata[f"{_CHECKSUM}.{tensor.name}"] = checksum_of(raw_bytes(tensor.stored))
        offset += tensor.stored.nbytes
        rest()
    metadata[f"{_CHECKSUM}.header"] = checksum_of(_dump(header))
    text = _dump(header)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(source: ByteSource, key: str) -> Header:
    """Read and verify the header of the chunk of this key. Raises ChunkFileError,
    UnreadableHereError, and what the source raises."""
    room = source.size - _LENGTH_BYTES
    length = int.from_bytes(source.read(0, _LENGTH_BYTES).data, "little") if room >= 0 else 0
    if length > room:
        raise ChunkFileError("truncated, or not a safetensors file")
    text = bytes(source.read(_LENGTH_BYTES, length).data)
    try:
        header = _parse(json.loads(text), key, start=_LENGTH_BYTES + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkFileError(
            f"its header is not a chunk file's ({type(error).__name__}: {error})"
        ) from error
    expected = header.start + header.entries[-1].end
    if source.size != expected:
        raise ChunkFileError(f"it has {source.size} bytes instead of {expected}")
    return header


def heads_names(indexed: Sequence[bool]) -> list[str]:
    """Return the names of all layers' keys and values, in order, and of what indexers keep in the
    layers that are ``indexed``."""
    width = max(2, len(str(len(indexed) - 1)))
    return [
        f"{LAYER}{number:0{width}d}.{part}"
        for number, has_index in enumerate(indexed)
        for part in (_KEY, _VALUE, *[_INDEX] * has_index)
    ]


def layer_sizes(names: Sequence[str]) -> list[int]:
    """Return how many of these names, as ``heads_names`` returns them, each layer has."""
    begins = [at for at, name in enumerate(names) if name.endswith(f".{_KEY}")]
    return [end - begin for begin, end in pairwise([*begins, len(names)])]


def _is_of_index(name: str) -> bool:
    return _INDEX in name.split(".")[2:3]


def part_name(heads: str, part: str) -> str:
    """Return the name of one of the parts that a codec makes of heads."""
    return f"{heads}.{part}" if part else heads


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's bytes."""
    return tensor.view(torch.uint8).reshape(-1).numpy().data


def checksum_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _parse(header: dict[str, Any], key: str, *, start: int) -> Header:
    metadata = header[_METADATA]
    newer = metadata["version"].isdecimal() and int(metadata["version"]) > STATES_ALONE_VERSION
    known = metadata["version"] in map(str, range(FORMAT_VERSION, STATES_ALONE_VERSION + 1))
    if metadata["format"] != FORMAT or not (known or newer):
        raise ChunkFileError(
            f"it is of format {metadata['format']} {metadata['version']}, not {FORMAT}"
            f" {FORMAT_VERSION} to {STATES_ALONE_VERSION}"
        )
    checksum = metadata.pop(f"{_CHECKSUM}.header")
    if checksum_of(_dump(header)) != checksum:
        raise ChunkFileError("its header does not match its checksum")
    if newer:
        raise UnreadableHereError(
            f"a newer kvlinker wrote it ({FORMAT} {metadata['version']}, this one knows up to"
            f" {STATES_ALONE_VERSION}). It is left alone: upgrade kvlinker, or choose another state"
            " directory"
        )
    if metadata["key"] != key:
        raise ChunkFileError(f"it holds chunk {metadata['key']}")
    del header[_METADATA]
    codec = known_codecs().get(metadata[_CODEC])
    if codec is None:
        raise MissingLibraryError(
            f"its codec {metadata[_CODEC]!r} is not known here: install the package that brings it"
        )
    entries = [_entry(name, fields, metadata) for name, fields in header.items()]
    parsed = Header(
        entries,
        start,
        codec,
        kv_dtypes()[metadata[_DTYPE]],
        Contextualization.from_json(metadata[_SCORES]) if _SCORES in metadata else None,
        _tokens(entries, metadata),
        int(metadata.get(_CONTEXTS, 1)),
    )
    _check_layout(parsed)
    return parsed


def _entry(name: str, fields: dict[str, Any], metadata: dict[str, str]) -> Entry:
    begin, end = fields["data_offsets"]
    dtype, shape = fields["dtype"], fields["shape"]
    plain = metadata.get(f"{_PLAIN}.{name}")
    if plain is not None:
        if (dtype, shape) != ("U8", [end - begin]):
            raise ValueError(f"{name} is not compressed bytes")
        dtype, *shape = json.loads(plain)
    checksum = metadata[f"{_CHECKSUM}.{name}"]
    return Entry(
        name, _dtypes()[dtype], tuple(shape), begin, end, checksum, compressed=plain is not None
    )


def _tokens(entries: Sequence[Entry], metadata: dict[str, str]) -> int:
    """Return the number of tokens, which the first heads have, or the metadata where there are
    none."""
    heads = next((entry for entry in entries if entry.name.startswith(LAYER)), None)
    if heads is None:
        return int(metadata[_TOKENS])
    if len(heads.shape) < 2:
        raise ValueError(f"{heads.name} has no tokens")
    return heads.shape[1]


def _check_layout(header: Header) -> None:
    """Raise ValueError unless the tensors are all layers' keys and values of one chunk, end to
    end."""
    entries = header.entries
    scores, layers = header.scores, header.layers
    if header.contexts < 1:
        raise ValueError(f"it was computed in {header.contexts} contexts")
    known = ((),) if header.contextualization is None else (SCORE_NAMES, SCORE_NAMES[:-1])
    if tuple(entry.name for entry in scores) not in known:
        raise ValueError("the scores are not where they belong")
    parts = header.codec.layout(header.dtype)
    sizes = layer_sizes([entry.name for entry in layers[:: len(parts)]])
    names = heads_names([size == len((_KEY, _VALUE, _INDEX)) for size in sizes])
    if not names and (not header.states or header.tokens < 1 or scores):
        raise ValueError("there are neither layers nor states of any tokens")
    if [entry.name for entry in layers] != [
        part_name(name, part) for name in names for part in parts
    ]:
        raise ValueError("the tensors are not layers in order")
    tokens = (header.tokens,)
    for index in range(0, len(layers), len(parts)):
        main = layers[index]
        for entry, (dtype, dimensions) in zip(
            layers[index : index + len(parts)], parts.values(), strict=True
        ):
            if entry.dtype != dtype or len(entry.shape) != dimensions:
                raise ValueError(
                    f"{entry.name} is not what the codec {header.codec.name} makes of"
                    f" {header.dtype}"
                )
            if entry.shape[:2] != main.shape[:1] + tokens:
                raise ValueError("a layer's tensors differ in heads or tokens")
    if any(entry.dtype != torch.float32 or entry.shape != tokens for entry in scores):
        raise ValueError("the scores are not one per token")
    if any(entry.dtype not in kv_dtypes().values() for entry in header.states):
        raise ValueError("the states are not numbers")
    offset = 0
    for entry in entries:
        if any(type(size) is not int or size < 1 for size in entry.shape) or entry.start != offset:
            raise ValueError(f"{entry.name} has an impossible shape or offset")
        _check_size(header, entry)
        offset = entry.end


def _check_size(header: Header, entry: Entry) -> None:
    """Raise ValueError for a size that is not the shape's, or that compression does not make of
    it."""
    stored = entry.end - entry.start
    plain = math.prod(entry.shape) * entry.dtype.itemsize
    if not entry.compressed:
        if stored != plain:
            raise ValueError(f"{entry.name} has a size that is not its shape's")
    elif not header.codec.compresses or not entry.name.startswith(LAYER):
        raise ValueError(f"{entry.name} is compressed, but the codec is {header.codec.name}")
    elif not stored < plain <= MOST_EXPANSION * stored:
        raise ValueError(f"{entry.name} claims {plain} bytes, but has {stored} compressed ones")


def named_states(states: Sequence[ChunkState]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all layers' states with their names, in order."""
    for index, state in enumerate(states):
        parts = [_MIXED, *(f"{_GATE}.{number}" for number in range(len(state.gates)))]
        if state.effect is not None:
            parts += [_FACTOR, _OFFSET]
        parts += [f"{_INNER}.{number}" for number in range(len(state.inner))]
        for part, tensor in zip(parts, state.tensors, strict=True):
            yield f"{PREFIX}{index:04d}.{part}", tensor


def states_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[ChunkState, ...]:
    """Return the states that ``named_states`` names so. Raises ValueError for anything else."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, _, part = name.removeprefix(PREFIX).partition(".")
        layers.setdefault(layer, {})[part] = tensor
    states = tuple(_state(parts) for parts in layers.values())
    if [name for name, _ in named_states(states)] != [name for name, _ in tensors]:
        raise ValueError("the states are not those of layers in order")
    return states


def _state(parts: dict[str, torch.Tensor]) -> ChunkState:
    gates, inner = (
        tuple(tensor for name, tensor in parts.items() if name.startswith(start))
        for start in (_GATE, _INNER)
    )
    effect = (parts[_FACTOR], parts[_OFFSET]) if {_FACTOR, _OFFSET} <= parts.keys() else None
    state = ChunkState(parts.get(_MIXED, torch.empty(0)), gates, effect, inner)
    edges = {len(gate) for gate in gates}
    uneven = len(edges) > 1 or len({len(part) for part in inner}) > 1
    if uneven or len(state.mixed) < max(edges, default=1):
        raise ValueError("a layer's tensors differ in tokens")
    if inner and ((gates and effect is None) or len(inner) != 1 + len(gates)):
        raise ValueError("a layer's inner tokens are not whole")
    if effect is not None and not effect[0].ndim == effect[1].ndim == 3:
        raise ValueError("what a layer's tokens do to a state is not a map")
    return state
