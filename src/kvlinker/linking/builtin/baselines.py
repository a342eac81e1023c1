"""The two ends of the scale, and the ablation of positions: what every other policy is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Evidence
from kvlinker.linking.policy import Policy
from kvlinker.linking.registry import register
from kvlinker.prompt.segments import Prompt


@register
class Full(Policy):
    """Recompute everything: the quality oracle."""

    family = "full"

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        return np.ones(len(prompt), dtype=np.bool_)


@register
class Naive(Policy):
    """Recompute nothing (EPIC's Naive, Prompt Cache, Cache-Craft's Full-Cache)."""

    family = "naive"

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        return np.zeros(len(prompt), dtype=np.bool_)


@register
class NaiveUnpositioned(Naive):
    """Recompute nothing, and leave keys at the positions they were computed at (Cache-Craft, Table 3)."""

    family = "naive-unpositioned"
    positioned = False
