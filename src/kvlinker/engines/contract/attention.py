"""Variants of attention, the positions of queries, and attention weights written out for
observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

QUERY_BLOCK = 256
"""The most queries that share one mask."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """One layer's variant of attention."""

    scale: float
    """The factor on the products of queries and keys."""

    window: int | None = None
    """A query sees the keys of the last ``window`` positions only, its own included."""

    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap); None for no cap."""

    sinks: Tensor | None = None
    """Extra logits [heads] that take part in the softmax and contribute no value; None for none."""

    @classmethod
    def of_call(cls, query: Tensor, options: Mapping[str, Any]) -> Self:
        """Read the keyword arguments that transformers passes to an attention function, with its
        query [..., head_dim]."""
        scaling = options.get("scaling")
        return cls(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )


@dataclass(frozen=True)
class Queries:
    """The positions [queries] of one request's queries that are computed together, ascending."""

    positions: Tensor

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def first(self) -> int:
        return int(self.positions[0])

    @cached_property
    def last(self) -> int:
        return int(self.positions[-1])

    @cached_property
    def contiguous(self) -> bool:
        return self.last - self.first + 1 == len(self)

    @cached_property
    def blocks(self) -> tuple[tuple[slice, Queries], ...]:
        """The queries in parts of at most QUERY_BLOCK, each with the rows that it takes."""
        rows = [slice(begin, begin + QUERY_BLOCK) for begin in range(0, len(self), QUERY_BLOCK)]
        return tuple((part, Queries(self.positions[part])) for part in rows)

    @cached_property
    def _masks(self) -> dict[tuple[int | None, int, torch.dtype], Tensor | None]:
        return {}

    def first_seen(self, window: int | None) -> int:
        """Return the first position that any of the queries sees."""
        return 0 if window is None else max(self.first - window + 1, 0)

    def mask(self, window: int | None, copies: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask [copies · queries, keys] of the positions [first_seen, last] that each of
        ``copies`` copies of the queries may attend to, 0 or -inf; None when all attend to all. It
        is made once for all layers of a kind."""
        if window is not None and self.last < window:
            window = None
        if len(self) == 1:
            return None
        variant = (window, copies, dtype)
        if variant not in self._masks:
            positions = self.positions[:, None]
            keys = torch.arange(self.first_seen(window), self.last + 1, device=positions.device)[
                None
            ]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[variant] = mask.repeat(copies, 1)
        return self._masks[variant]


def attention_weights(
    queries: Queries, query: Tensor, key: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute the attention weights that ``attend`` would use: [heads, queries, last + 1], fp32;
    for few queries.

    Positions of queries that lie on the CPU spare waiting for another device.
    """
    first = queries.first_seen(options.window)
    groups = query.shape[0] // key.shape[0]
    folded = query.reshape(key.shape[0], groups * len(queries), query.shape[2])
    windowed = options.window is not None and queries.last >= options.window
    mask = (
        None
        if queries.contiguous and not windowed
        else queries.mask(options.window, groups, torch.float32)
    )
    if mask is not None:
        mask = mask.to(query.device)
    scores = attention_scores(folded, key[:, first:], mask, options).view(
        query.shape[0], len(queries), -1
    )
    if mask is None:  # only the queries' own positions hide anything
        own = scores[..., -len(queries) :]
        own.masked_fill_(torch.ones_like(own[0], dtype=torch.bool).triu_(1), float("-inf"))
    if options.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        total = torch.logaddexp(torch.logsumexp(scores, dim=-1), options.sinks.float()[:, None])
        weights = torch.exp(scores - total[..., None])
    return F.pad(weights, (first, 0)) if first else weights


def attention_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Compute the logits of attention before the softmax, fp32; the matrix product has the inputs'
    precision."""
    scores = scaled_scores(torch.matmul(query, key.transpose(1, 2)).float(), options)
    return scores if mask is None else scores + mask


def scaled_scores(products: Tensor, options: AttentionOptions) -> Tensor:
    """Return the logits of attention whose ``products`` of queries and keys, fp32, these are; they
    are changed."""
    scores = products.mul_(options.scale)
    return (
        scores
        if options.softcap is None
        else options.softcap * torch.tanh(scores / options.softcap)
    )
