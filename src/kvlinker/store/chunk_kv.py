"""Holds the KV of one chunk, in memory or in a copy that is read layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.store.lazy_torch import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """KV of one layer: ``key`` and ``value`` [kv_heads, tokens, head_dim].

    Where it is computed, written and sent, the key has no rotary embedding. In its resident form,
    which an engine attends to, the key has that of the chunk's own positions 0, 1, ….
    """

    key: torch.Tensor
    value: torch.Tensor

    index: torch.Tensor | None = None
    """The indexer's data of each token, [1, tokens, dim], without rotary embedding in either form;
    None if the layer has no indexer."""

    @classmethod
    def of_joined(
        cls, joined: torch.Tensor, key_dim: int, index: torch.Tensor | None = None
    ) -> LayerKV:
        """Return key and value that are the first ``key_dim`` and the last dimensions of one
        tensor."""
        return cls(joined[..., :key_dim], joined[..., key_dim:], index)

    @classmethod
    def of_parts(cls, parts: Sequence[torch.Tensor]) -> LayerKV:
        """Return the layer that has these ``parts``."""
        key, value, *index = parts
        return cls(key, value, index[0] if index else None)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Key, value and, if there is one, the indexer's data."""
        found = self.key, self.value
        return found if self.index is None else (*found, self.index)

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """The parts as they lie: key and value in one tensor, where they are joined."""
        return (self.joined, *self.parts[2:]) if self.is_joined else self.parts

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        index = 0 if self.index is None else self.index.nbytes
        return self.key.nbytes + self.value.nbytes + index

    @property
    def is_joined(self) -> bool:
        """True if key and value are in one tensor, with each token's next to each other."""
        key, value = self.key, self.value
        return (
            key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            and value.storage_offset() == key.storage_offset() + key.shape[-1]
            and key.stride() == value.stride()
        )

    @property
    def joined(self) -> torch.Tensor:
        """Key and value in one tensor [kv_heads, tokens, key_dim + value_dim]: where they lie, or
        copies."""
        key, value = self.key, self.value
        if self.is_joined:
            return key.as_strided((*key.shape[:-1], key.shape[-1] + value.shape[-1]), key.stride())
        return torch.cat([key, value], dim=-1)

    def to(self, device: torch.device) -> LayerKV:
        """Return the layer on the device, itself where it is there, joined where it is joined."""
        if self.key.device == device:
            return self
        return self.moved(lambda part: part.to(device))

    def moved(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> LayerKV:
        """Return a copy of the layer, of which ``copied`` makes each of its ``pieces``."""
        pieces = [copied(piece) for piece in self.pieces]
        if not self.is_joined:
            return LayerKV.of_parts(pieces)
        return LayerKV.of_joined(pieces[0], self.key.shape[-1], *pieces[1:])


@dataclass(frozen=True, slots=True)
class ChunkState:
    """The effect of a chunk's tokens on any state, in one layer that keeps one.

    The first tokens and the last one, its edges, are kept as they enter the layer, so that they can
    be left out where they are computed anew; the joint effect of the inner tokens is one map, S →
    factor · S + offset. A chunk that is too short for a map has no inner tokens. Where a layer only
    convolves there is no map, and its one edge is what convolutions from the last token on see.
    """

    mixed: torch.Tensor
    """The inputs of the convolution: [rows, channels], a row for each token of the edges, and for
    those before the last one that its convolution sees."""

    gates: tuple[torch.Tensor, ...]
    """The other inputs of a rule, for each token of the edges: [tokens, …] each."""

    effect: tuple[torch.Tensor, torch.Tensor] | None = None
    """The map's factor, [heads, rows, rows] or [heads, 1, 1], and its offset [heads, rows,
    columns]."""

    inner: tuple[torch.Tensor, ...] = ()
    """The inputs of the inner tokens, if they are kept in addition to their map: [tokens,
    channels], and the gates."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in order."""
        return (self.mixed, *self.gates, *(self.effect or ()), *self.inner)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ChunkKV:
    """The KV of all layers of one chunk. Its tensors are never modified after creation, and on the
    CPU, except for what the device tier gives.

    ``scores`` are figures of attention while the KV was computed, if they were collected.
    ``states`` are those of layers that have a state instead of KV, in order.
    """

    layers: tuple[LayerKV, ...]
    scores: ChunkScores | None = None
    states: tuple[ChunkState, ...] = ()

    tokens: int = 0
    """The number of tokens of the chunk. It has to be given where no layer has KV."""

    contexts: int = 1
    """The number of contexts that the chunk was computed in; the KV is the mean over them."""

    nbytes: int = field(init=False, compare=False)
    """The bytes of all layers, of the scores and of the states."""

    def __post_init__(self) -> None:
        """Raises ValueError if neither layers nor ``tokens`` say how many tokens there are."""
        if self.layers:
            object.__setattr__(self, "tokens", int(self.layers[0].key.shape[1]))
        elif not self.tokens:
            raise ValueError("a chunk without KV needs its number of tokens")
        nbytes = 0 if self.scores is None else self.scores.nbytes
        for layer in self.layers:
            nbytes += layer.nbytes
        for state in self.states:
            nbytes += state.nbytes
        object.__setattr__(self, "nbytes", nbytes)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, as ``ArrivingKV.layer`` does. Raises IndexError."""
        return self.layers[index]


class LayerLostError(Exception):
    """Raised when a layer cannot be read from this copy of the chunk; the message says why."""


class ChunkReader(Protocol):
    """An opened copy of a chunk, whose header has been read and verified. One thread at a time uses
    it."""

    @property
    def layers(self) -> int:
        """The number of layers."""

    @property
    def tokens(self) -> int:
        """The number of tokens that the chunk has."""

    @property
    def nbytes(self) -> int:
        """The bytes that are read for all layers, as the tier keeps them."""

    @property
    def contexts(self) -> int:
        """The number of contexts that the chunk was computed in."""

    @property
    def scores(self) -> ChunkScores | None:
        """The scores that are stored with the chunk."""

    @property
    def states(self) -> tuple[ChunkState, ...]:
        """The chunk's states, of the layers that have one."""

    def read(self, layer: int) -> LayerKV:
        """Read, verify and decode one layer. Raises LayerLostError."""

    def close(self) -> None:
        """Close the copy. Idempotent."""


class ResidentForm:
    """The form of chunks in memory: the form that an engine attends to. By default it is the KV as
    it was computed, for an engine that attends to no chunk in place."""

    def resident(self, index: int, layer: LayerKV) -> LayerKV:
        """Return a layer, given as it was computed, in the form in which the engine attends to
        it."""
        return layer

    def computed(self, index: int, layer: LayerKV) -> LayerKV:
        """Return a resident layer in the form in which it was computed, with rounding errors."""
        return layer


def mean_with(kv: ChunkKV, other: ChunkKV) -> ChunkKV:
    """Return the mean over the contexts of both, where the first one's KV is. Both are as they were
    computed: keys have no rotary embedding."""
    contexts = kv.contexts + other.contexts
    weight = other.contexts / contexts

    def mean(index: int, layer: LayerKV) -> LayerKV:
        others = other.layer(index).to(layer.key.device).parts
        return LayerKV.of_parts(
            [
                torch.lerp(part.float(), second.float(), weight).to(part.dtype)
                for part, second in zip(layer.parts, others, strict=True)
            ]
        )

    return replace(changed(kv, mean), contexts=contexts)


def changed(kv: ChunkKV, change: Callable[[int, LayerKV], LayerKV]) -> ChunkKV:
    """Return the chunk's KV with each layer replaced by ``change(index, layer)``."""
    layers = tuple(change(index, layer) for index, layer in enumerate(kv.layers))
    return replace(kv, layers=layers)
