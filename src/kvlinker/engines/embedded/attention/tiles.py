"""Cuts the KV that the queries of a step see into tiles that Triton's kernel computes: a few
queries, and the keys that they visit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.engines.embedded.attention.bundles import Bundle
from kvlinker.engines.embedded.attention.views import View
from kvlinker.engines.gpu.launching import all_on_device

Array = NDArray[np.int64]

PROGRAMS = 264
"""The programs that fill a GPU: two on each of 132 processors. With fewer tiles than that, their
keys are divided."""

FEWEST_KEYS = 256
"""The fewest keys of a program where a tile's are divided."""

EMPTY = np.zeros(0, np.int64)


class TileTables:
    """The tables that ``attend_tile`` and ``merge_partials`` read, on the device."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        positions: Array,
        *,
        window: int | None,
        tile_rows: int,
        programs: int,
        device: torch.device,
    ) -> None:
        """A tile has up to ``tile_rows`` queries, and is computed by ``programs``, each for other
        heads."""
        sights = _Sights(positions, window, tile_rows)
        tiles = [tile for bundle in bundles for tile in sights.tiles(bundle)]
        keys = sum(tile.keys for tile in tiles) * programs
        pieces = [piece for tile in tiles for piece in tile.cut(max(FEWEST_KEYS, keys // PROGRAMS))]
        times = np.zeros(len(positions), np.int64)
        for piece in pieces:
            times[piece.rows] += 1
        self.tiles = len(pieces)

        self.sees_all = bool(times.all())
        """False if there are queries that see nothing."""

        self.partial_rows = 0
        found: list[tuple[int, int]] = []  # queries, and their rows in the partial results
        table: list[tuple[int, int, int]] = []
        visits: list[tuple[int, ...]] = []
        for piece in pieces:
            partial = -1
            if (times[piece.rows] > 1).any():
                partial, self.partial_rows = self.partial_rows, self.partial_rows + tile_rows
                found.extend((int(row), partial + at) for at, row in enumerate(piece.rows))
            table.append((len(visits), len(piece.visits), partial))
            visits.extend(visit.row for visit in piece.visits)
        found.sort()
        targets, counts = np.unique([row for row, _ in found], return_counts=True)

        self.targets = len(targets)
        """The number of queries whose partial results are to be merged."""

        tables = [
            np.concatenate([_padded(piece.rows, tile_rows, -1) for piece in pieces] or [EMPTY]),
            np.concatenate(sights.rows or [EMPTY]),
            np.array(visits, np.int64),
            np.array(table, np.int64),
            sights.hidden(),
            targets.astype(np.int64),
            np.cumsum([0, *counts], dtype=np.int64),
            np.array([source for _, source in found], np.int64),
        ]
        flat = all_on_device(tables, device)
        self.attended = [*flat[:4], flat[4].view(torch.uint8)]
        """Rows, sights, visits, tiles and hidden keys."""

        self.merged = flat[5:]
        """Targets, and where their partial results are."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """Keys [first, last) of a segment, of which a tile's queries see what ``sights`` says."""

    segment: int
    first: int
    last: int
    sights: int
    hides: bool

    @property
    def row(self) -> tuple[int, ...]:
        return self.segment, self.first, self.last, self.sights, self.hides


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries, and the keys that they visit."""

    rows: Array
    visits: tuple[_Visit, ...]

    @property
    def keys(self) -> int:
        return sum(visit.last - visit.first for visit in self.visits)

    def cut(self, most: int) -> Iterator[_Tile]:
        """Yield the tile in pieces of at most ``most`` keys."""
        piece: list[_Visit] = []
        room = most
        for visit in self.visits:
            first = visit.first
            while first < visit.last:
                last = min(visit.last, first + room)
                piece.append(replace(visit, first=first, last=last))
                room -= last - first
                first = last
                if not room:
                    yield _Tile(self.rows, tuple(piece))
                    piece, room = [], most
        if piece:
            yield _Tile(self.rows, tuple(piece))


class _Sights:
    """Collects what each query of a tile sees in each visit."""

    def __init__(self, positions: Array, window: int | None, tile_rows: int) -> None:
        self._positions = positions
        self._window = window
        self._tile_rows = tile_rows
        self.rows: list[Array] = []
        """For each visit, one after the other: distances, first keys, last keys, and bits."""

        self._hidden: list[NDArray[np.uint8]] = []
        self._hidden_bytes = 0

    def tiles(self, bundle: Bundle) -> Iterator[_Tile]:
        """Yield the bundle's queries in tiles, each with the keys that any of its own sees."""
        rows = np.concatenate([np.arange(each.start, each.stop) for each in bundle.members])
        visits = [self._seen(visit) for visit in bundle.visits]
        for begin in range(0, len(rows), self._tile_rows):
            part = slice(begin, begin + self._tile_rows)
            found = []
            for views, seen in zip(bundle.visits, visits, strict=True):
                _, low, high, bits = own = seen[:, part]
                sees = low < high
                if sees.any():
                    first, last = int(low[sees].min()), int(high[sees].max())
                    hides = bool((bits >= 0).any())
                    found.append(_Visit(views[0].segment, first, last, len(self.rows), hides))
                    self.rows.append(_padded(own, self._tile_rows, 0).reshape(-1))
            yield _Tile(rows[part], tuple(found))

    def hidden(self) -> Array:
        """Return all bits, eight bytes in a number."""
        padding = np.zeros(8 - self._hidden_bytes % 8, np.uint8)
        return np.concatenate([*self._hidden, padding]).view(np.int64)

    def _seen(self, visit: Sequence[View]) -> Array:
        """Return distances, first keys, last keys and bits of all members' queries: [4,
        queries]."""
        parts = []
        for view in visit:
            positions = self._positions[view.rows]
            low, high = view.bounds(positions, self._window)
            bits = np.full(len(positions), -1 if view.hidden is None else self._hidden_bytes)
            if view.hidden is not None:
                self._hidden.append(np.packbits(view.hidden, bitorder="little"))
                self._hidden_bytes += len(self._hidden[-1])
            parts.append(np.stack([positions - view.rotary_start, low, high, bits]))
        return np.concatenate(parts, axis=1)


def _padded(rows: Array, length: int, value: int) -> Array:
    """Return ``rows`` [..., rows] with ``length`` rows."""
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, length - rows.shape[-1])]
    return np.pad(rows, padding, constant_values=value)
