"""Rank correlation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def spearman(first: NDArray[np.floating], second: NDArray[np.floating]) -> float | None:
    """Spearman's rank correlation of two samples of equal length, equal values sharing their mean rank.

    None where it is not defined: for fewer than two values, and where all values of a sample are equal.
    """
    ranks = np.stack([_ranks(first), _ranks(second)])
    ranks -= (ranks.shape[1] + 1) / 2
    lengths = np.linalg.norm(ranks, axis=1)
    return float(ranks[0] @ ranks[1] / lengths.prod()) if lengths.all() else None


def _ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """From 1 on; equal values get the mean of the ranks that they take up."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2
    ranks: NDArray[np.float64] = mean_rank[inverse]
    return ranks
