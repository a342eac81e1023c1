"""Logits of attention over all positions of a sequence, for observers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions, scaled_scores
from kvlinker.engines.embedded.attention.native_dots import dot_products
from kvlinker.engines.embedded.attention.views import Segments, View
from kvlinker.engines.embedded.model.rotary import Rotary


def position_scores(
    views: Sequence[View],
    positions: NDArray[np.int64],
    query: Tensor,
    segments: Segments,
    rotary: Rotary | None,
    options: AttentionOptions,
    length: int,
    *,
    native: bool = True,
) -> Tensor:
    """Return the logits before the softmax, without sinks: [heads, queries, length], fp32, -inf
    where not seen.

    ``query`` [heads, queries, key_dim], without rotary embedding, are some of a sequence's queries,
    at ``positions`` [queries], ascending. ``views`` are the sequence's; their rows do not matter.
    It is meant for few queries. With ``native``, native code multiplies queries by keys where there
    is one.
    """
    heads, queries, key_dim = query.shape
    scores = query.new_full((heads, queries, length), float("-inf"), dtype=torch.float32)
    for view, rotated in zip(views, _rotated(views, positions, query, rotary), strict=True):
        low, high = view.bounds(positions, options.window)
        first, last = int(low.min()), int(high.max())
        if first == last:
            continue
        keys = np.arange(first, last)
        seen = (keys >= low[:, None]) & (keys < high[:, None])
        if view.hidden is not None:
            seen &= ~view.hidden[first:last]
        columns: slice | Tensor = slice(view.start + first, view.start + last)
        if view.positions is not None:
            columns = torch.from_numpy(view.positions[first:last]).to(query.device)
        key = segments[view.segment][0][:, first:last]
        products = dot_products(rotated, key) if native else None
        if products is None:
            folded = rotated.float().view(len(key), -1, key_dim)
            products = torch.matmul(folded, key.float().transpose(1, 2)).view(heads, queries, -1)
        found = scaled_scores(products, options)
        if not seen.all():
            found = torch.where(
                torch.from_numpy(seen).to(query.device), found, scores[..., columns]
            )
        scores[..., columns] = found
    return scores


def _rotated(
    views: Sequence[View], positions: NDArray[np.int64], query: Tensor, rotary: Rotary | None
) -> Sequence[Tensor]:
    """Return the queries as they ask each of the views: [heads, queries, key_dim] each."""
    if rotary is None:
        return [query.contiguous()] * len(views)
    distances = np.concatenate([positions - view.rotary_start for view in views])
    repeated = query.repeat(1, len(views), 1)
    rotated = torch.empty_like(repeated)  # rounded as the attention's own queries are
    rotary.rotate(repeated, *rotary.at(torch.from_numpy(distances).to(query.device)), out=rotated)
    return [part.contiguous() for part in torch.split(rotated, query.shape[1], dim=1)]


def position_weights(
    views: Sequence[View],
    positions: NDArray[np.int64],
    query: Tensor,
    segments: Segments,
    rotary: Rotary | None,
    options: AttentionOptions,
    length: int,
    *,
    picked: Tensor | None = None,
    native: bool = True,
) -> Tensor:
    """Return the attention weights, sinks taken into account, for what ``position_scores`` takes:
    [heads, queries, length], fp32. Where tokens are ``picked`` for each query, [groups of heads,
    queries, length or more], the others' are zero."""
    scores = position_scores(
        views, positions, query, segments, rotary, options, length, native=native
    )
    if picked is not None:
        groups = scores.view(len(picked), -1, *scores.shape[1:])
        groups.masked_fill_(~picked[:, None, :, :length], float("-inf"))
    if options.sinks is None:
        return torch.softmax(scores, dim=-1)
    total = torch.logaddexp(torch.logsumexp(scores, dim=-1), options.sinks.float()[:, None])
    return torch.exp(scores - total[..., None])
