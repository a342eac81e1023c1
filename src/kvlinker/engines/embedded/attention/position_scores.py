"""Attention weights over all positions of a sequence, for observers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.contract.attention import AttentionOptions, scaled_scores
from kvlinker.engines.embedded.attention.kernel import Segments, View
from kvlinker.engines.embedded.attention.native_kernel import Dots, Heads, heads
from kvlinker.engines.embedded.model.rotary import Rotary

MOST_QUERIES = 8
"""The most queries whose products with keys native code computes faster than PyTorch, which widens
all keys first."""


class PositionScores:
    """Computes what some queries of a sequence attend to, position by position, in all layers that
    show them the same. It is meant for few queries."""

    def __init__(
        self,
        views: Sequence[View],
        positions: NDArray[np.int64],
        rotary: Rotary | None,
        window: int | None,
        length: int,
        *,
        device: torch.device | str = "cpu",
        native: bool = True,
    ) -> None:
        """``views`` are the sequence's; their rows do not matter. The queries are at ``positions``
        [queries], ascending. Those of all keys in the views that they see are less than ``length``.
        With ``native``, native code multiplies queries by keys where there is one."""
        self._rotary = rotary
        self._queries, self._length = len(positions), length
        self._native = native
        self._keys: list[tuple[int, slice]] = []
        columns, seen, distances = [], [], []
        for view in views:
            low, high = view.bounds(positions, window)
            first, last = int(low.min()), int(high.max())
            if first == last:
                continue
            keys = np.arange(first, last)
            mine = (keys >= low[:, None]) & (keys < high[:, None])
            if view.hidden is not None:
                mine &= ~view.hidden[first:last]
            seen.append(mine)
            self._keys.append((view.segment, slice(first, last)))
            columns.append(
                view.start + keys if view.positions is None else view.positions[first:last]
            )
            distances.append(positions - view.rotary_start)
        if self._keys:
            self._place(np.concatenate(columns), np.concatenate(seen, axis=1), device)
            if rotary is not None:
                at = torch.from_numpy(np.concatenate(distances)).to(device)
                self._rotations = rotary.at(at)

    def scores(self, query: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
        """Return one layer's logits before the softmax, without sinks: [heads, queries, length],
        fp32, -inf where not seen. ``query`` [heads, queries, key_dim] has no rotary embedding."""
        shape = len(query), self._queries, self._length
        if not self._keys:
            return query.new_full(shape, float("-inf"), dtype=torch.float32)
        asking = self._asking(query)
        keys = [segments[segment][0][:, part] for segment, part in self._keys]
        products = dot_products(asking, keys) if self._native else None
        if products is None:
            parts = zip(torch.split(asking, self._queries, dim=1), keys, strict=True)
            products = torch.cat([_products(each, key) for each, key in parts], dim=2)
        scores = scaled_scores(products, options)
        if self._moved is not None:
            shown, columns = self._moved
            found = scores[..., shown]
            scores = scores.new_full(shape, float("-inf"))
            scores[..., columns] = found
        return scores if self._unseen is None else scores.masked_fill_(self._unseen, float("-inf"))

    def weights(
        self,
        query: Tensor,
        segments: Segments,
        options: AttentionOptions,
        *,
        picked: Tensor | None = None,
    ) -> Tensor:
        """Return one layer's attention weights, sinks taken into account: [heads, queries, length],
        fp32. Where tokens are ``picked`` for each query, [groups of heads, queries, length or
        more], the others' are zero."""
        scores = self.scores(query, segments, options)
        if picked is not None:
            groups = scores.view(len(picked), -1, *scores.shape[1:])
            groups.masked_fill_(~picked[:, None, :, : self._length], float("-inf"))
        if options.sinks is None:
            return torch.softmax(scores, dim=-1)
        total = torch.logaddexp(torch.logsumexp(scores, dim=-1), options.sinks.float()[:, None])
        return torch.exp(scores - total[..., None])

    def _place(
        self, columns: NDArray[np.int64], seen: NDArray[np.bool_], device: torch.device | str
    ) -> None:
        """Find how the products of all keys, whose positions are ``columns`` [keys], become those
        of all positions, where each query has ``seen`` [queries, keys] some. A position that is
        seen is that of one key alone."""
        shown = np.flatnonzero(seen.any(axis=0))
        self._moved = None
        if not np.array_equal(columns, np.arange(self._length)):
            self._moved = (
                torch.from_numpy(shown).to(device),
                torch.from_numpy(columns[shown]).to(device),
            )
        unseen = np.ones((len(seen), self._length), bool)
        unseen[:, columns[shown]] = ~seen[:, shown]
        self._unseen = torch.from_numpy(unseen).to(device) if unseen.any() else None

    def _asking(self, query: Tensor) -> Tensor:
        """Return the queries as they ask each part of the keys, one after the other: [heads, parts
        · queries, key_dim]."""
        repeated = query.repeat(1, len(self._keys), 1)
        if self._rotary is None:
            return repeated
        rotated = torch.empty_like(repeated)  # rounded as the attention's own queries are
        self._rotary.rotate(repeated, *self._rotations, out=rotated)
        return rotated


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries and keys in fp32: [heads, queries, keys]."""
    folded = query.float().reshape(len(key), -1, query.shape[2])
    return torch.matmul(folded, key.float().transpose(1, 2)).view(*query.shape[:2], -1)


class NativeDots:
    """Multiplies queries by keys in bf16, with sums in fp32. Keys are read where they lie."""

    def __init__(self) -> None:
        """Load the function, and compare it with PyTorch. Raises NativeUnavailableError."""
        self._compute = native.functions("attention.cpp", {"kvlinker_dots": Dots})["kvlinker_dots"]
        generator = torch.Generator().manual_seed(0)
        query, *keys = (
            torch.randn(*shape, 72, generator=generator).bfloat16()
            for shape in ((4, 6), (2, 37), (2, 16))
        )
        asked = torch.split(query.float(), 3, dim=1)
        expected = [
            each @ key.float().repeat_interleave(2, dim=0).mT
            for each, key in zip(asked, keys, strict=True)
        ]
        native.require_close(
            self.multiply(query, keys),
            torch.cat(expected, dim=2),
            "the product of queries and keys",
        )

    def multiply(self, query: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Return the products of queries with the keys of several parts of a sequence: [heads,
        queries, keys of all parts], fp32.

        ``query`` [heads, parts · queries, dim] is each part's in turn; ``keys`` are [kv_heads,
        keys, dim], all bf16 on the CPU. Query heads share key heads in equal groups, neighbours
        first.
        """
        columns = sum(key.shape[1] for key in keys)
        products = torch.empty(
            len(query), query.shape[1] // len(keys), columns, dtype=torch.float32
        )
        parts = (Heads * len(keys))(*(Heads(*heads(key)) for key in keys))
        self._compute(
            Dots(
                query=Heads(*heads(query)),
                keys=parts,
                parts=len(keys),
                products=products.data_ptr(),
                threads=torch.get_num_threads(),
            )
        )
        return products


@cache
def native_dots() -> NativeDots | None:
    """Return the native products, compiled when first asked for; None if there are none, and the
    log says why."""
    return native.or_fall_back(NativeDots, "Observed attention takes PyTorch's products")


def dot_products(query: Tensor, keys: Sequence[Tensor]) -> Tensor | None:
    """Return what ``NativeDots.multiply`` returns; None if native code cannot compute it, or not
    faster than PyTorch."""
    fits = (
        query.is_cpu
        and query.dtype == torch.bfloat16
        and all(key.dtype == torch.bfloat16 for key in keys)
        and query.shape[1] <= MOST_QUERIES * len(keys)
    )
    dots = native_dots() if fits else None
    return None if dots is None else dots.multiply(query, keys)
