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
    """Return the indices of the ``count`` largest numbers, the largest first: [count].

    They are in those ``count`` blocks whose largest numbers are the largest.
    """
    whole = len(row) // BLOCK * BLOCK
    if count * BLOCK >= whole:
        found = np.arange(len(row))
    else:
        peaks = row[:whole].reshape(-1, BLOCK).max(axis=1)
        blocks = np.argpartition(peaks, -count)[-count:] if count else np.empty(0, np.int64)
        inside = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        found = np.concatenate((inside, np.arange(whole, len(row))))
    values = row[found]
    if 0 < count < len(found):
        best = np.argpartition(values, -count)[-count:]
        found, values = found[best], values[best]
    return found[np.argsort(-values, kind="stable")][:count]


def at_point(weights: Row, point: float) -> int:
    """Return where a ``point`` from 0 to 1 lies if all lie one behind the other, each as long as
    its weight: the index of a weight above 0. Without any, or where some are no numbers, it is the
    number of weights."""
    whole = len(weights) // BLOCK * BLOCK
    sums = weights[:whole].reshape(-1, BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.append(sums, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted = point * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    if not block < len(ends):
        return _last(weights) if ends[-1] > 0 else len(weights)
    before = ends[block - 1] if block else 0.0
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    found = int(np.searchsorted(before + inside.cumsum(dtype=np.float64), wanted, side="right"))
    if found == len(inside):  # the block's sum was rounded otherwise
        found = int(np.flatnonzero(inside)[-1])
    return block * BLOCK + found


def _last(weights: Row) -> int:
    return int(np.flatnonzero(weights)[-1])
