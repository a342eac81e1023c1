"""Sums up scattered points: means in bins, lines through zero, and shares of the highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker.service.audit.statistics import Interval


@dataclass(frozen=True, slots=True)
class Bin:
    """Holds means of neighbouring points."""

    x: float
    """The mean x."""
    y: float
    """The mean y."""
    interval: Interval
    """The confidence interval of the mean y."""
    n: int
    """Number of points."""


def make_bins(x: Sequence[float], y: Sequence[float], bins: int) -> list[Bin]:
    """Make at most ``bins`` bins of about equally many points, ascending in ``x``; equal x are
    never parted."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if not len(across):
        return []
    edges = np.unique(np.quantile(across, np.linspace(0, 1, bins + 1)))
    place = np.clip(np.searchsorted(edges, across, side="right") - 1, 0, max(len(edges) - 2, 0))
    found = []
    for index in np.unique(place):
        mine = place == index
        values = up[mine].tolist()
        found.append(
            Bin(
                float(across[mine].mean()),
                float(up[mine].mean()),
                mean_interval(values),
                len(values),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """Describes the line y = ``slope`` · x."""

    slope: float
    r2: float | None
    """1 - Σ(y - slope·x)² / Σ(y - ȳ)²: below 0, the mean alone fits better; None where y never
    changes."""


def line_through_zero(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit by least squares without an intercept; the slope is 0 where all x are 0."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    size = float(across @ across)
    slope = float(across @ up) / size if size else 0.0
    spread = float(((up - up.mean()) ** 2).sum()) if len(up) else 0.0
    return Line(slope, 1 - float(((up - slope * across) ** 2).sum()) / spread if spread else None)


def cumulative_share(values: NDArray[np.floating], shares: Sequence[float]) -> NDArray[np.float64]:
    """Return what the highest ``shares`` (0 to 1) of the ``values`` [n], none negative, hold of
    their sum.

    Between whole values it is in proportion. Where all are 0, it is their share of n.
    """
    ordered = np.sort(values.astype(np.float64))[::-1]
    held = np.concatenate([[0.0], np.cumsum(ordered)])
    if not held[-1]:
        return np.asarray(shares, dtype=np.float64)
    reached: NDArray[np.float64] = np.interp(
        np.asarray(shares) * len(values), np.arange(len(held)), held / held[-1]
    )
    return reached
