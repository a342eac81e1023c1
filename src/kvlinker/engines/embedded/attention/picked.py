"""Attention over tokens that an indexer has picked for each query, by PyTorch. All scores of a
query are computed, and those of the other tokens left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.kernel import Segments, View
from kvlinker.engines.embedded.attention.position_scores import PositionScores
from kvlinker.engines.embedded.model.rotary import Rotary

PAIRS_AT_ONCE = 1 << 20
"""The most queries of all heads times tokens whose weights are computed at once."""


class Picked(NamedTuple):
    """The tokens picked for the queries of one sequence, which are the ``rows`` of a batch: [groups
    of heads, queries, length], true for tokens that are seen."""

    rows: slice
    mask: Tensor


def attend_picked(
    views: Sequence[View],
    positions: NDArray[np.int64],
    query: Tensor,
    segments: Segments,
    rotary: Rotary | None,
    options: AttentionOptions,
    picked: Sequence[Picked],
    *,
    output: Tensor,
    native: bool = True,
) -> None:
    """Compute one layer into ``output`` [queries, heads, value_dim], from what
    ``AttentionKernel.attend`` takes; ``positions`` [queries] are the queries'."""
    heads = len(query)
    values = [value for _, value in segments]
    for rows, mask in picked:
        length = mask.shape[-1]
        mine = [view for view in views if view.rows == rows]
        value = by_position(mine, values, length)
        at_once = max(1, PAIRS_AT_ONCE // (heads * length))
        for begin in range(rows.start, rows.stop, at_once):
            part = slice(begin, min(begin + at_once, rows.stop))
            scores = PositionScores(
                mine,
                positions[part],
                rotary,
                options.window,
                length,
                device=query.device,
                native=native,
            )
            seen = mask[:, part.start - rows.start : part.stop - rows.start]
            weights = scores.weights(query[:, part], segments, options, picked=seen)
            folded = weights.to(value.dtype).view(len(value), -1, length)
            found = torch.bmm(folded, value).view(heads, -1, value.shape[-1])
            output[part] = found.transpose(0, 1)


def mask_of(rows: slice, picked: Sequence[Picked]) -> Tensor:
    """Return what was picked for some of one sequence's queries: [groups of heads, queries,
    length]."""
    whole, mask = next(each for each in picked if each.rows.start <= rows.start < each.rows.stop)
    return mask[:, rows.start - whole.start : rows.stop - whole.start]


def by_position(views: Sequence[View], segments: Sequence[Tensor], length: int) -> Tensor:
    """Return what a sequence's ``views`` show of ``segments`` [heads, tokens, dim], in the order of
    positions: [heads, length, dim], zero where nothing stands."""
    like = segments[views[0].segment]
    found = like.new_zeros(len(like), length, like.shape[-1])
    for view in views:
        shown = np.arange(view.first, view.last)
        if view.hidden is not None:
            shown = shown[~view.hidden[view.first : view.last]]
        places = view.start + shown if view.positions is None else view.positions[shown]
        inside = places < length
        part = segments[view.segment].to(found.device)
        if len(shown) == view.last - view.first and view.positions is None:
            count = int(inside.sum())
            at = view.start + view.first
            found[:, at : at + count] = part[:, view.first : view.first + count]
        else:
            found[:, places[inside]] = part[:, shown[inside]]
    return found
