"""Choosing tokens by score."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def share(percent: float, count: int) -> int:
    """``percent`` of ``count`` tokens, rounded up."""
    return min(count, math.ceil(round(percent * count / 100, 6)))


def highest(scores: NDArray[np.floating], count: int, among: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """The mask [tokens] of the ``count`` highest ``scores`` [tokens], only where ``among`` is true.

    Of equal scores, the earlier token is taken.
    """
    candidates = np.arange(len(scores)) if among is None else np.flatnonzero(among)
    order = np.argsort(-scores[candidates], kind="stable")
    chosen = np.zeros(len(scores), dtype=np.bool_)
    chosen[candidates[order[:count]]] = True
    return chosen
