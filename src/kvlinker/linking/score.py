"""Figures by which tokens were chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = 6
"""Significant digits in JSON."""


@dataclass(frozen=True, slots=True)
class Score:
    """Figures by which tokens were chosen: one per entry of ``positions`` [n], or per chunk without positions.

    ``layer``: where they were looked at; None for before the first layer.
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
