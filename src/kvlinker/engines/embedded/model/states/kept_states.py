"""Describes what layers with a state store of a chunk, and counts its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.states.recurrence import Recurrence
from kvlinker.store.chunk_kv import ChunkState

FIRST_TOKENS = 32
"""The number of a chunk's first tokens that are kept one by one, so that they can be computed anew
in a prompt."""


class Edges(NamedTuple):
    """The tokens of a chunk that are its edges: [0, first) and [last, tokens). The effect of the
    inner ones between on a state is kept as one map."""

    first: int
    last: int
    tokens: int

    context: int
    """From here on, what enters convolutions is kept for the second edge."""


def edges_of(anatomy: Anatomy, tokens: int, first_tokens: int) -> Edges:
    """Return the edges of a chunk of ``tokens`` tokens: all of it, where what would be left between
    them is too little for the last token's convolution.

    Where layers only convolve, its edge is what the convolutions of its last token, and of the
    tokens after it, see.
    """
    window = anatomy.window
    if anatomy.only_convolves:
        last = last_edge(tokens, window)
        return Edges(0, last, tokens, last)
    first = max(first_tokens, window)
    if tokens - 1 - first < window:
        return Edges(tokens, tokens, tokens, tokens)
    return Edges(first, tokens - 1, tokens, tokens - 1 - window)


def first_edge(states: Sequence[ChunkState], tokens: int, window: int) -> int:
    """Return the number of tokens of the first edge of a chunk of ``tokens`` tokens, whose layers
    have rules, and whose convolutions see ``window`` tokens back."""
    is_mapped = any(state.effect is not None for state in states)
    return len(states[0].mixed) - window - 1 if is_mapped else tokens


def last_edge(tokens: int, window: int) -> int:
    """Return where the edge of a chunk of ``tokens`` tokens begins, where layers only convolve, and
    see ``window`` tokens back."""
    return max(tokens - window - 1, 0)


def chunk_bytes(anatomy: Anatomy, tokens: int, dtype: torch.dtype, *, keeps_inner: bool) -> int:
    """Count the bytes that layers with a state keep of a chunk of ``tokens`` tokens; with
    ``keeps_inner``, the inputs of its inner tokens are among it."""
    edges = edges_of(anatomy, tokens, FIRST_TOKENS)
    inner = edges.last - edges.first
    entering = tokens if keeps_inner else tokens - inner
    total = 0
    for each in anatomy.recurrences:
        total += entering * each.entering_bytes(dtype)
        if inner:
            context = edges.last - edges.context
            total += each.effect_bytes(dtype) + context * each.channels * dtype.itemsize
    return total


def shape_like(
    states: Sequence[ChunkState], anatomy: Anatomy, tokens: int, *, keeps_inner: bool
) -> bool:
    """Return whether ``states`` have the shape of what is kept of a chunk of ``tokens`` tokens."""
    edges = edges_of(anatomy, tokens, FIRST_TOKENS)
    return len(states) == len(anatomy.recurrences) and all(
        _has_shape(state, recurrence, edges, keeps_inner=keeps_inner)
        for state, recurrence in zip(states, anatomy.recurrences, strict=True)
    )


def _has_shape(
    state: ChunkState, recurrence: Recurrence, edges: Edges, *, keeps_inner: bool
) -> bool:
    first, last, tokens, context = edges
    inner = last - first
    kept = [(state.gates, first + tokens - last)]
    entering = [(state.mixed, first + tokens - context)]
    if keeps_inner and inner:
        kept.append((state.inner[1:], inner))
        entering += [(part, inner) for part in state.inner[:1]]
    if bool(state.inner) != (keeps_inner and inner > 0):
        return False
    if any(part.shape != (rows, recurrence.channels) for part, rows in entering):
        return False
    for gates, rows in kept:
        if any(len(gate) != rows for gate in gates):
            return False
        if sum(gate.nbytes for gate in gates) != rows * recurrence.gate_bytes:
            return False
    if state.effect is None or recurrence.rule is None:
        return (state.effect is None) == (recurrence.rule is None or not inner)
    sizes = tuple(part.numel() for part in state.effect)
    return inner > 0 and sizes == recurrence.rule.effect_values(recurrence.state_shape)
