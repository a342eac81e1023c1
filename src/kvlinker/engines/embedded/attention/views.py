"""Describes the KV that the queries of a step see: views of segments, whose keys and values are in
memory once for all queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]

Segments = Sequence[KeyValue]
"""A layer's segments: key [kv_heads, keys, key_dim], with rotary embedding, and value [kv_heads,
keys, value_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The part of one segment that one sequence's queries see.

    A query sees the keys [first, last) that are not hidden, and whose positions are not after its
    own and, in layers with a window, less than the window before it. Values of all keys in [first,
    last) are finite, hidden ones too.
    """

    segment: int
    """Index into the layer's segments."""

    rows: slice
    """The sequence's queries in the batch: neighbours, with ascending positions."""

    start: int
    """Position of the segment's key 0 in the sequence, where ``positions`` is None."""

    rotary_start: int
    """Position from which the keys' rotary embedding counts: the query at p is rotated by p -
    rotary_start, which may be negative."""

    first: int
    """The segment's first key that may be seen."""

    last: int
    """The key after the last one that may be seen."""

    hidden: NDArray[np.bool_] | None = None
    """[keys], true: not seen, because the token is computed anew and lies elsewhere."""

    positions: NDArray[np.int64] | None = None
    """[keys], ascending: every key's position in the sequence, where they do not follow one
    another."""

    def trimmed(self) -> View | None:
        """Return the view with hidden keys at its ends cut off, and without a mask where none is
        left in between; None if it shows nothing."""
        if self.hidden is None:
            return self if self.first < self.last else None
        seen = ~self.hidden[self.first : self.last]
        if not seen.any():
            return None
        first, last = self.first + int(seen.argmax()), self.last - int(seen[::-1].argmax())
        hidden = None if np.count_nonzero(seen) == last - first else self.hidden
        return replace(self, first=first, last=last, hidden=hidden)

    def bounds(
        self, positions: NDArray[np.int64], window: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the range of keys [low, high) that each query sees but for hidden ones: [queries]
        each, low = high where there is none. ``positions`` [queries] are the queries'."""
        high = self._before(positions + 1)
        if window is None:
            return np.minimum(self.first, high), high
        return np.minimum(self._before(positions - window + 1), high), high

    def _before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the segment's keys that stand before each position, none below ``first`` or above
        ``last``."""
        if self.positions is None:
            found = positions - self.start
        else:
            found = np.searchsorted(self.positions[: self.last], positions)
        return np.clip(found, self.first, self.last)


def farthest(view: View, positions: NDArray[np.int64]) -> int:
    """Return the most positions, in either direction, by which one of the view's queries is
    rotated."""
    first, last = int(positions[view.rows.start]), int(positions[view.rows.stop - 1])
    return max(abs(first - view.rotary_start), abs(last - view.rotary_start))


@dataclass(frozen=True)
class AttentionPlan:
    """Holds what a step's queries see, prepared by a kernel for all layers."""

    views: tuple[View, ...]
    """The views that show anything, trimmed."""

    positions: NDArray[np.int64]
    """Every query's position in its sequence: [queries]."""

    @classmethod
    def of(cls, views: Sequence[View], positions: NDArray[np.int64]) -> Self:
        """Return the plan for these views."""
        return cls(tuple(seen for view in views if (seen := view.trimmed()) is not None), positions)
