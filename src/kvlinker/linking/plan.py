"""The link plan of one request: the placements of chunks and the positions to compute, as an
immutable value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunks import Chunk
from kvlinker.linking.policy import Policy
from kvlinker.prompting.segments import Prompt, Range

DroppedTokens = tuple[int, NDArray[np.int64]]
"""Tokens that a policy dropped between layers: the first layer that does without them, and their
positions."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A chunk in the prompt: its token i stands at position ``start + i``, and the KV of its tokens
    [first, last) is used."""

    chunk: Chunk
    start: int
    first: int
    last: int

    rotary_start: int
    """The keys' rotary embedding is that of position ``rotary_start + i``. It equals ``start``,
    except in ablations."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The placements of chunks and the positions to compute.

    Every position is in a run, in a placement, or in both: then the computed KV counts.
    """

    policy: Policy
    prompt: Prompt = field(repr=False)
    placements: tuple[Placement, ...]

    runs: tuple[Range, ...]
    """Maximal ranges [begin, end) of positions to compute, ascending."""

    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    """Tokens without KV; ``cached_tokens`` are those whose KV was there and is kept, reused ones
    among them."""

    selections: tuple[NDArray[np.bool_], ...] = field(repr=False, compare=False)
    """The cached tokens that each of ``policy.parts`` selected: masks, [length] each."""

    @property
    def length(self) -> int:
        """The number of the prompt's tokens."""
        return len(self.prompt)

    @property
    def computed(self) -> NDArray[np.bool_]:
        """The mask of the positions in runs: [length]."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for begin, end in self.runs:
            mask[begin:end] = True
        return mask


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """The use of a placed chunk by one request. ``recomputed`` is the share of its tokens that were
    computed again, averaged over the layers."""

    chunk: Chunk
    recomputed: float


def chunk_uses(
    plan: LinkPlan, layers: int, dropped: Sequence[DroppedTokens] = ()
) -> tuple[ChunkUse, ...]:
    """Return the use of each placed chunk, in order, in a model of ``layers`` layers."""
    computed = np.mean(layer_masks(plan, layers if dropped else 1, dropped), axis=0)
    return tuple(
        ChunkUse(
            placement.chunk,
            float(computed[placement.start : placement.start + len(placement.chunk)].mean()),
        )
        for placement in plan.placements
    )


def layer_masks(
    plan: LinkPlan, layers: int, dropped: Sequence[DroppedTokens] = ()
) -> list[NDArray[np.bool_]]:
    """Make masks of the positions that each of the first ``layers`` layers computes, [length]
    each."""
    mask = plan.computed
    masks = []
    for layer in range(layers):
        for first, positions in dropped:
            if first == layer:
                mask = mask.copy()
                mask[positions] = False
        masks.append(mask)
    return masks
