"""Selections that no request could make, because they were made from what it would have to compute first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking import Evidence, Policy, highest, share
from kvlinker.prompt.segments import Prompt


class Chosen(Policy):
    """Tokens that were chosen beforehand, at ``positions`` of the prompt. It is not registered: it knows one prompt."""

    positions: tuple[int, ...]

    family = "chosen"

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        selected[list(self.positions)] = True
        return selected


def most_deviating(prompt: Prompt, distance: NDArray[np.float32], percent: float) -> Chosen:
    """The r percent of the inexact tokens whose KV really deviates most, over all layers.

    ``distance`` [layers, tokens]: as from ``kv_distance``, of the prompt linked without repair. CacheBlend (section
    4.2) chooses anew in every layer; here a token is computed in all layers or in none.
    """
    deviation = np.linalg.norm(distance, axis=0)
    count = share(percent, int(prompt.inexact.sum()))
    return Chosen(tuple(np.flatnonzero(highest(deviation, count, among=prompt.inexact)).tolist()))
