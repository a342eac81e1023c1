"""Cuts the KV that the queries of a step see into tiles that Triton's kernel computes: a few
queries, and the keys that they visit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.embedded.attention.kernel import Bundle, View
from kvlinker.engines.gpu.launching import all_on_device

Array = NDArray[np.int64]

PROGRAMS = 264
"""The programs that fill a GPU: two on each of 132 processors. With fewer tiles than that, their
keys are divided."""

KEY_MINIMUM = 256
"""The fewest keys of a program where a tile's are divided."""

EMPTY = np.zeros(0, np.int64)

FARTHEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class PlacedTables:
    """Tables on the device, as ``attend_tile`` and ``merge_partials`` read them."""

    attended: Sequence[Tensor]
    """Rows, sights, visits, tiles and hidden keys."""

    merged: Sequence[Tensor]
    """Targets, and where their partial results are."""

    tiles: int
    targets: int
    """The number of queries whose partial results are to be merged."""

    partial_rows: int
    sees_all: bool
    """False if there may be queries that see nothing."""

    @classmethod
    def of(
        cls, flat: Sequence[Tensor], *, tiles: int, targets: int, partial_rows: int, sees_all: bool
    ) -> PlacedTables:
        """Return ``TileTables.arrays`` that are on the device, flat."""
        rows, sights, visits, table, hidden, *merged = flat
        attended = rows, sights, visits, table, hidden.view(torch.uint8)
        return cls(attended, merged, tiles, targets, partial_rows, sees_all)


class TileTables:
    """The tables that ``attend_tile`` and ``merge_partials`` read, in the host's memory."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        positions: Array,
        *,
        window: int | None,
        tile_rows: int,
        programs: int,
    ) -> None:
        """A tile has up to ``tile_rows`` queries, and is computed by ``programs``, each for other
        heads."""
        sights = _Sights(positions, window, tile_rows)
        tiles = [tile for bundle in bundles for tile in sights.tiles(bundle)]
        keys = sum(tile.keys for tile in tiles) * programs
        pieces = [piece for tile in tiles for piece in tile.cut(max(KEY_MINIMUM, keys // PROGRAMS))]
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
            visits.extend(piece.visits)
        found.sort()
        targets, counts = np.unique([row for row, _ in found], return_counts=True)

        self.targets = len(targets)
        """The number of queries whose partial results are to be merged."""

        rows = np.full((len(pieces), tile_rows), -1)
        for index, piece in enumerate(pieces):
            rows[index, : len(piece.rows)] = piece.rows
        arrays = [
            rows,
            np.concatenate(sights.rows or [EMPTY]),
            np.array(visits, np.int64),
            np.array(table, np.int64),
            sights.hidden(),
            targets.astype(np.int64),
            np.cumsum([0, *counts], dtype=np.int64),
            np.array([source for _, source in found], np.int64),
        ]

        self.arrays: tuple[Array, ...] = tuple(array.reshape(-1) for array in arrays)
        """Rows, sights, visits, tiles, hidden keys, targets, where the partial results of each
        target begin, and these: as both kernels read them, flat."""

    def on(self, device: torch.device) -> PlacedTables:
        """Return the tables on the device."""
        return PlacedTables.of(
            all_on_device(self.arrays, device),
            tiles=self.tiles,
            targets=self.targets,
            partial_rows=self.partial_rows,
            sees_all=self.sees_all,
        )


class _Visit(NamedTuple):
    """Keys [first, last) of a segment, of which a tile's queries see what ``sights`` says."""

    segment: int
    first: int
    last: int
    sights: int
    hides: bool


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
                piece.append(visit._replace(first=first, last=last))
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

        self._visits = 0
        self._hidden: list[NDArray[np.uint8]] = []
        self._hidden_bytes = 0

    def tiles(self, bundle: Bundle) -> Iterator[_Tile]:
        """Yield the bundle's queries in tiles, each with the keys that any of its own sees."""
        rows = np.concatenate([np.arange(each.start, each.stop) for each in bundle.members])
        count, size = -(-len(rows) // self._tile_rows), self._tile_rows
        seen = np.zeros((len(bundle.visits), 4, count * size), np.int64)
        seen[:, 3] = -1
        for index, visit in enumerate(bundle.visits):
            seen[index, :, : len(rows)] = self._seen(visit)
        tiles = seen.reshape(-1, 4, count, size).transpose(2, 0, 1, 3)
        low, high, bits = tiles[:, :, 1], tiles[:, :, 2], tiles[:, :, 3]
        sees = low < high
        first = np.where(sees, low, FARTHEST).min(-1)
        last = np.where(sees, high, 0).max(-1)
        hides: NDArray[np.bool_] = np.any(bits >= 0, axis=-1)
        for number in range(count):
            indices = np.flatnonzero(sees[number].any(axis=-1))
            visits = tuple(
                _Visit(
                    bundle.visits[index][0].segment,
                    int(first[number, index]),
                    int(last[number, index]),
                    self._visits + at,
                    bool(hides[number, index]),
                )
                for at, index in enumerate(indices)
            )
            self._visits += len(indices)
            self.rows.append(tiles[number, indices].reshape(-1))
            yield _Tile(rows[number * size : (number + 1) * size], visits)

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
