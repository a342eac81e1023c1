"""A layer's variant of attention, and its weights written out for those who look on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

QUERY_BLOCK = 256
"""Queries that share one mask at most."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's variant of attention.

    ``window``: a query sees the keys of the last ``window`` positions, its own included. ``softcap``: scores
    become softcap·tanh(score / softcap). ``sinks`` [heads]: extra logits that take attention and give nothing.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Queries:
    """Positions of one request's queries that are computed together, ascending: [queries]."""

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
        """Parts of at most QUERY_BLOCK queries, with the rows that they take."""
        rows = [slice(begin, begin + QUERY_BLOCK) for begin in range(0, len(self), QUERY_BLOCK)]
        return tuple((part, Queries(self.positions[part])) for part in rows)

    @cached_property
    def _masks(self) -> dict[tuple[int | None, int, torch.dtype], Tensor | None]:
        return {}

    def first_seen(self, window: int | None) -> int:
        """The first position that any of the queries sees."""
        return 0 if window is None else max(self.first - window + 1, 0)

    def mask(self, window: int | None, copies: int, dtype: torch.dtype) -> Tensor | None:
        """What each of ``copies`` copies of the queries sees of positions [first_seen, last]: 0 or -inf,
        [copies · queries, keys]; None when all see all. Computed once for all layers of a kind."""
        if window is not None and self.last < window:
            window = None
        if len(self) == 1:
            return None
        variant = (window, copies, dtype)
        if variant not in self._masks:
            positions = self.positions[:, None]
            keys = torch.arange(self.first_seen(window), self.last + 1, device=positions.device)[None]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
            self._masks[variant] = mask.repeat(copies, 1)
        return self._masks[variant]


def attention_weights(queries: Queries, query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
    """The weights that ``attend`` would use, written out: [heads, queries, last + 1], fp32. Meant for few queries."""
    first = queries.first_seen(options.window)
    groups = query.shape[0] // key.shape[0]
    folded = query.reshape(key.shape[0], groups * len(queries), query.shape[2])
    windowed = options.window is not None and queries.last >= options.window
    mask = None if queries.contiguous and not windowed else queries.mask(options.window, groups, torch.float32)
    scores = attention_scores(folded, key[:, first:], mask, options).view(query.shape[0], len(queries), -1)
    if mask is None:  # only the queries' own positions hide anything
        own = scores[..., -len(queries) :]
        own.masked_fill_(torch.ones_like(own[0], dtype=torch.bool).triu_(1), float("-inf"))
    if options.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        total = torch.logaddexp(torch.logsumexp(scores, dim=-1), options.sinks.float()[:, None])
        weights = torch.exp(scores - total[..., None])
    return F.pad(weights, (first, 0)) if first else weights


def attention_scores(query: Tensor, key: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """What the softmax is taken of, fp32; the matrix product has the inputs' precision."""
    scores = torch.matmul(query, key.transpose(1, 2)).float().mul_(options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores if mask is None else scores + mask
