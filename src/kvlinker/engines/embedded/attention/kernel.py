"""The interface of attention kernels, and what they compute over: views of segments, whose keys and
values are in memory once for all queries of a step, and bundles of sequences that see the same
ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.model.rotary import Rotary

KeyValue = tuple[Tensor, Tensor]

Segments = Sequence[KeyValue]
"""A layer's segments: key [kv_heads, keys, key_dim], with rotary embedding, and value [kv_heads,
keys, value_dim]."""


SHARED_ROWS = 16
"""The largest number of a sequence's queries that are computed together with other sequences'. More
than that fill the kernel's tiles alone, and would pay for partial results without gaining anything:
with two query heads per key head, two to sixteen sequences took 0.40 to 0.95 of the time together
with up to 16 queries each, and 0.98 to 1.09 with 32."""


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

    def trimmed(self) -> View:
        """Return the view with hidden keys at its ends cut off, and without a mask where none is
        left in between; one that shows nothing has no keys."""
        if self.hidden is None:
            return self
        seen = ~self.hidden[self.first : self.last]
        if not seen.any():
            return replace(self, last=self.first, hidden=None)
        first, last = self.first + int(seen.argmax()), self.last - int(seen[::-1].argmax())
        hidden = None if np.count_nonzero(seen) == last - first else self.hidden
        return replace(self, first=first, last=last, hidden=hidden)

    def bounds(
        self, positions: NDArray[np.int64], window: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the range of keys [low, high) in which each query sees all that are not hidden:
        [queries] each, low = high where there is none. ``positions`` [queries] are the queries'."""
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
        return cls(seen_views(views), positions)


def farthest(views: Sequence[View], positions: NDArray[np.int64]) -> int:
    """Return the largest number of positions, in either direction, by which a query of the views is
    rotated; 0 without views."""
    found = 0
    for view in views:
        first, last = int(positions[view.rows.start]), int(positions[view.rows.stop - 1])
        found = max(found, abs(first - view.rotary_start), abs(last - view.rotary_start))
    return found


def seen_views(views: Sequence[View]) -> tuple[View, ...]:
    """Return the views that show anything, trimmed."""
    seen = []
    for view in views:
        if view.hidden is not None:
            view = view.trimmed()
        if view.first < view.last:
            seen.append(view)
    return tuple(seen)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Sequences that see the same segments."""

    members: tuple[slice, ...]
    """Every sequence's queries in the batch."""

    visits: tuple[tuple[View, ...], ...]
    """For every segment, each member's view of it, in the order of ``members``."""


_BY_ROWS = attrgetter("rows.start", "rows.stop")


def bundle_views(views: Sequence[View]) -> tuple[Bundle, ...]:
    """Group the segments by the sequences that see them.

    A query's results in several bundles must be merged. All segments that only one sequence sees
    are one bundle. A segment that it sees twice counts as two.
    """
    visits: defaultdict[tuple[int, ...], list[View]] = defaultdict(list)
    occurrences: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    for view in views:
        begin, end = view.rows.start, view.rows.stop
        occurrence = occurrences[view.segment, begin, end]
        occurrences[view.segment, begin, end] += 1
        alone = (begin, end) if end - begin > SHARED_ROWS else ()
        visits[view.segment, occurrence, *alone].append(view)
    bundles: defaultdict[tuple[tuple[int, int], ...], list[tuple[View, ...]]] = defaultdict(list)
    for visit in visits.values():
        visit.sort(key=_BY_ROWS)
        bundles[tuple([_BY_ROWS(view) for view in visit])].append(tuple(visit))
    return tuple(
        [
            Bundle(tuple([slice(*member) for member in members]), tuple(found))
            for members, found in bundles.items()
        ]
    )


class AttentionKernel(Protocol):
    """Computes the attention of a step's queries over the segments that they see."""

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> AttentionPlan:
        """Prepare what is the same in all layers; ``positions`` [queries] are those of all queries
        of the step."""
        ...

    def write(
        self,
        plan: AttentionPlan,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        rotary: Rotary | None,
        into: KeyValue,
    ) -> None:
        """Write the step's new keys, which are rotated on the way, and values to ``slots``
        [queries] of a pool.

        ``key`` and ``value`` are [kv_heads, queries, dim], those of the pool, ``into``, [kv_heads,
        slots, dim].
        """
        ...

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,
        segments: Segments,
        rotary: Rotary | None,
        options: AttentionOptions,
        *,
        output: Tensor,
    ) -> None:
        """Compute one layer into ``output`` [queries, heads, value_dim], zero where a query sees
        nothing.

        ``query`` [heads, queries, key_dim] has no rotary embedding; query heads share key heads in
        equal groups, neighbours first. Without ``rotary``, the segments' keys have none either. The
        plan is one of this kernel.
        """
        ...
