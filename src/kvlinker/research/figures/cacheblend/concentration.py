"""How much of something few tokens hold."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking import highest, share


def top_share(values: NDArray[np.floating], percent: float) -> float:
    """The share of the sum that the highest ``percent`` of the values [n], none negative, hold.

    Where all are 0, their share of n.
    """
    top = highest(values, share(percent, len(values)))
    total = float(values.sum(dtype=np.float64))
    return float(values[top].sum(dtype=np.float64)) / total if total else float(top.mean())


def times_others(held: float, percent: float) -> float:
    """The mean of the highest ``percent``, which hold ``held`` of the sum, over the mean of all others."""
    return held / percent * (100 - percent) / (1 - held) if held < 1 else math.inf


def share_among_top(values: NDArray[np.floating], marked: NDArray[np.bool_], percent: float) -> float:
    """How many of the highest ``percent`` of the values [n] are ``marked`` [n]."""
    return float(marked[highest(values, share(percent, len(values)))].mean())
