"""Functions that choose tokens by score, and the figures by which they were chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
