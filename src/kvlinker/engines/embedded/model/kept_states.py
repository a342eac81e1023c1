"""Says what layers with a state keep of a chunk, and what it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvlinker.engines.embedded.model.anatomy import Anatomy

FIRST_TOKENS = 32
"""The number of a chunk's first tokens that are kept one by one, so that they can be computed anew
in a prompt."""


class Edges(NamedTuple):
    """Which tokens of a chunk are its edges: [0, first) and [last, tokens). What the inner ones
    between do to a state is kept as one map."""

    first: int
    last: int
    tokens: int


def edges_of(window: int, tokens: int, first_tokens: int) -> Edges:
    """Return the edges of a chunk of so many tokens, whose convolutions see ``window`` tokens back:
    all of it, where what would be left between them is too little for the last token."""
    first = max(first_tokens, window)
    has_inner = tokens - 1 - first >= window
    return Edges(first, tokens - 1, tokens) if has_inner else Edges(tokens, tokens, tokens)


def chunk_bytes(anatomy: Anatomy, tokens: int, dtype: torch.dtype, *, keeps_inner: bool) -> int:
    """Count the bytes of what layers with a state keep of a chunk of so many tokens, what enters of
    its inner tokens among it if they ``keep_inner``."""
    entering = sum(each.entering_bytes(dtype) for each in anatomy.recurrences)
    first = edges_of(anatomy.window, tokens, FIRST_TOKENS).first
    if first == tokens:
        return tokens * entering
    rows = tokens if keeps_inner else first + 1
    maps = sum(each.effect_values + each.window * each.channels for each in anatomy.recurrences)
    return rows * entering + maps * dtype.itemsize
