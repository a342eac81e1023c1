"""Searches one row of a number for each token, some hundred thousand at most, in a fraction of the
time that sorting or summing it up takes: block by block first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
"""A number for each token: [vocabulary]."""

BLOCK = 256
"""The numbers of a block."""


def largest(row: Row, count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` largest numbers, the largest first: [count]. Of equal
    numbers the first ones go first, as in ``argmax``."""
    if not 0 < count < len(row):
        return np.argsort(-row, kind="stable")[:count]
    found = np.flatnonzero(row >= _largest(row, count))
    return found[np.argsort(-row[found], kind="stable")][:count]


def _largest(row: Row, count: int) -> np.float32:
    """Return the last one of the ``count`` largest numbers, which are in those ``count`` blocks
    whose largest numbers are the largest."""
    whole = len(row) // BLOCK * BLOCK
    if count * BLOCK < whole:
        blocks = row[:whole].reshape(-1, BLOCK)
        best = np.argpartition(blocks.max(axis=1), -count)[-count:]
        row = np.concatenate((blocks[best].ravel(), row[whole:]))
    return np.float32(np.partition(row, -count)[-count])


def at_point(weights: Row, point: float) -> int:
    """Return where a ``point`` from 0 to 1 lies if all lie one behind the other, each as long as
    its weight: the index of one of the weights above 0, of which there are some."""
    whole = len(weights) // BLOCK * BLOCK
    sums = weights[:whole].reshape(-1, BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.append(sums, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted = point * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    if block == len(ends):
        return int(np.flatnonzero(weights)[-1])
    before = ends[block - 1] if block else 0.0
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    found = int(np.searchsorted(before + inside.cumsum(dtype=np.float64), wanted, side="right"))
    if found == len(inside):  # the block's sum was rounded otherwise
        found = int(np.flatnonzero(inside)[-1])
    return block * BLOCK + found
