"""Groups the queries that share one call of PyTorch's kernels: all that see a segment, unless masks
cost more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvlinker.engines.contract.attention import QUERY_BLOCK
from kvlinker.engines.embedded.attention.kernel import View

CALL_COST = 2048
"""Work of one attention call besides its arithmetic, in query-key pairs."""

KEY_COST = 8
"""Work of reading one more key, in query-key pairs."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Queries that attend together to the keys [first, last) of a segment."""

    segment: int
    rows: NDArray[np.int64]
    """The queries' indices in the batch."""

    distances: NDArray[np.int64]
    """[queries]: what each is rotated by."""

    first: int
    last: int

    mask: NDArray[np.bool_] | None = None
    """[queries, keys], true: not seen."""

    causal: bool = False
    """Query i sees the first i + 1 of the keys, which are as many as the queries; there is no
    mask."""


def group_queries(
    views: Sequence[View], positions: NDArray[np.int64], window: int | None, *, long_runs: bool
) -> tuple[AttentionCall, ...]:
    """Join queries until the masked-out work of a call costs as much as another call.

    With tokens at even distances this is the size at which masked-out work and calls together cost
    least. With ``long_runs``, more than QUERY_BLOCK neighbours that see one key more each are split
    into the keys before them and their own, which takes no mask.
    """
    by_segment: defaultdict[int, list[View]] = defaultdict(list)
    for view in views:
        by_segment[view.segment].append(view)
    calls: list[AttentionCall] = []
    for seeing in by_segment.values():
        group = _Group()
        for piece in (
            piece for view in seeing for piece in _pieces(view, positions[view.rows], window)
        ):
            if (
                long_runs
                and piece.rising
                and len(piece.rows) > QUERY_BLOCK
                and piece.view.hidden is None
            ):
                calls.extend(_long_run(piece, positions))
                continue
            for part in piece.parts():
                if not group.take(part):
                    calls.append(group.call(positions))
                    group = _Group()
                    group.take(part)
        if group.pieces:
            calls.append(group.call(positions))
    return tuple(calls)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Neighbouring queries that see keys [low, high) of a view: all the same, or each one key
    further than the last."""

    view: View
    rows: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]

    @property
    def rising(self) -> bool:
        """True if every query sees one key more than the one before."""
        return bool(self.high[-1] > self.high[0] and self.low[-1] == self.low[0])

    @property
    def uniform(self) -> bool:
        """True if all queries see the same keys without a gap, so that no mask is needed."""
        return bool(
            self.high[-1] == self.high[0]
            and self.low[-1] == self.low[0]
            and self.view.hidden is None
        )

    @property
    def extent(self) -> tuple[int, int]:
        """The keys [first, last) that any of the queries sees."""
        return int(self.low[0]), int(self.high[-1])

    def parts(self) -> Iterator[_Piece]:
        """Yield the piece in parts of queries that may share one mask."""
        size = len(self.rows) if self.uniform else QUERY_BLOCK
        for begin in range(0, len(self.rows), size):
            part = slice(begin, begin + size)
            yield _Piece(self.view, self.rows[part], self.low[part], self.high[part])


def _pieces(view: View, positions: NDArray[np.int64], window: int | None) -> Iterator[_Piece]:
    low, high = view.bounds(positions, window)
    rows = np.arange(view.rows.start, view.rows.stop)
    if view.hidden is None:
        sees = high > low
    else:
        seen_before = np.concatenate([[0], np.cumsum(~view.hidden)])
        sees = seen_before[high] > seen_before[low]
    rows, low, high = rows[sees], low[sees], high[sees]
    if len(rows) <= 1:
        if len(rows):
            yield _Piece(view, rows, low, high)
        return
    steps = np.stack([np.diff(rows), np.diff(low), np.diff(high)])
    connected = (steps[0] == 1) & (steps[1] <= 1) & (steps[2] <= 1)
    alike = np.concatenate([[True], ~connected[:-1] | (steps[:, 1:] == steps[:, :-1]).all(axis=0)])[
        : len(connected)
    ]
    edges = [0, *(np.flatnonzero(~(connected & alike)) + 1).tolist(), len(rows)]
    for begin, end in pairwise(edges):
        yield _Piece(view, rows[begin:end], low[begin:end], high[begin:end])


class _Group:
    """Pieces of one segment's views that share a call."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self._queries = 0
        self._seen = 0  # query-key pairs
        self._first = self._last = 0

    def take(self, piece: _Piece) -> bool:
        """Add the piece unless a call of its own costs less. An empty group takes all."""
        low, high = piece.extent
        first = min(self._first, low) if self.pieces else low
        last = max(self._last, high)
        queries = self._queries + len(piece.rows)
        seen = self._seen + len(piece.rows) * (high - low)
        masked_out = queries * (last - first) - seen
        if self.pieces and (
            queries > QUERY_BLOCK or masked_out > CALL_COST + KEY_COST * (last - first)
        ):
            return False
        self.pieces.append(piece)
        self._queries, self._seen, self._first, self._last = queries, seen, first, last
        return True

    def call(self, positions: NDArray[np.int64]) -> AttentionCall:
        """Return the call that computes all pieces."""
        first, last = self._first, self._last
        mask = None
        if not all(piece.uniform and piece.extent == (first, last) for piece in self.pieces):
            keys = np.arange(first, last)
            masks = []
            for piece in self.pieces:
                part = (keys < piece.low[:, None]) | (keys >= piece.high[:, None])
                masks.append(
                    part if piece.view.hidden is None else part | piece.view.hidden[first:last]
                )
            mask = np.concatenate(masks)
        rows = np.concatenate([piece.rows for piece in self.pieces])
        distances = np.concatenate(
            [positions[piece.rows] - piece.view.rotary_start for piece in self.pieces]
        )
        return AttentionCall(self.pieces[0].view.segment, rows, distances, first, last, mask)


def _long_run(piece: _Piece, positions: NDArray[np.int64]) -> Iterator[AttentionCall]:
    """Yield the call over the keys before a rising piece's own, if any, and the one over its
    own."""
    segment, distances = piece.view.segment, positions[piece.rows] - piece.view.rotary_start
    first, own, last = int(piece.low[0]), int(piece.high[0]) - 1, int(piece.high[-1])
    if first < own:
        yield AttentionCall(segment, piece.rows, distances, first, own)
    yield AttentionCall(segment, piece.rows, distances, own, last, causal=True)
