"""Functions that choose tokens by score, and the figures by which they were chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.prompting.segments import Range

DIGITS = 6
"""The number of significant digits of figures in JSON."""


@dataclass(frozen=True, slots=True)
class Score:
    """Figures by which tokens were chosen: one per entry of ``positions`` [n], or per chunk without
    positions.

    ``layer`` is the layer in which they were measured; None for before the first layer.
    """

    name: str
    values: NDArray[np.floating] = field(repr=False)
    positions: NDArray[np.int64] | None = field(default=None, repr=False)
    layer: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "of": "chunks" if self.positions is None else "tokens",
            "layer": self.layer,
            "positions": None if self.positions is None else self.positions.tolist(),
            "values": [float(f"{value:.{DIGITS}g}") for value in self.values.tolist()],
        }


def share(percent: float, count: int) -> int:
    """Return ``percent`` of ``count`` tokens, rounded up."""
    return min(count, math.ceil(round(percent * count / 100, 6)))


def highest(
    scores: NDArray[np.floating], count: int, among: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Make the mask [tokens] of the ``count`` highest ``scores`` [tokens], only where ``among`` is
    true.

    Of equal scores, the earlier token is taken.
    """
    candidates = np.arange(len(scores)) if among is None else np.flatnonzero(among)
    order = np.argsort(-scores[candidates], kind="stable")
    chosen = np.zeros(len(scores), dtype=np.bool_)
    chosen[candidates[order[:count]]] = True
    return chosen


def highest_windows(
    scores: NDArray[np.floating], count: int, width: int, ranges: Sequence[Range]
) -> NDArray[np.bool_]:
    """Make the mask [tokens] of at least ``count`` tokens in windows of ``width`` neighbours inside
    one of ``ranges``, or of all of a shorter range: one after the other those with the highest sum
    of ``scores`` [tokens] that do not overlap. Where no window is left, the highest single
    tokens."""
    chosen = np.zeros(len(scores), dtype=np.bool_)
    sums = np.full(len(scores), -np.inf)  # of the window that begins at each position
    first, widths = np.zeros(len(scores), dtype=np.int64), np.zeros(len(scores), dtype=np.int64)
    for begin, end in ranges:
        own = min(width, end - begin)
        if not own:
            continue
        total = np.concatenate(((0.0,), np.cumsum(scores[begin:end], dtype=np.float64)))
        sums[begin : end - own + 1] = total[own:] - total[:-own]
        first[begin:end], widths[begin:end] = begin, own
    missing = count
    # windows of one token are the highest tokens, which need no search one by one
    while width > 1 and missing > 0 and np.isfinite(sums[at := int(np.argmax(sums))]):
        own = int(widths[at])
        chosen[at : at + own] = True
        sums[max(at - own + 1, int(first[at])) : at + own] = -np.inf
        missing -= own
    return chosen | highest(scores, max(missing, 0), among=(widths > 0) & ~chosen)
