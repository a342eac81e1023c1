"""Cache-Craft's parts one by one: policies for its ablations, which no user needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking import Evidence, Policy, highest, percentage, share
from kvlinker.linking.policies.cachecraft import CacheCraft, context_impact
from kvlinker.prompt.segments import Prompt


class ContextOrder(Policy):
    """The r percent of every inexact chunk's tokens that looked at earlier chunks most: Cache-Craft's order (equation
    14) without its CFO."""

    family = "inter"
    uses_scores = True

    percent: float = percentage()

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for index, span in enumerate(prompt.spans):
            scores = evidence.scores(index)
            if not span.exact:
                looked = np.zeros(span.length) if scores is None else scores.inter
                selected[span.start : span.end] = highest(looked, share(self.percent, span.length))
        return selected


class UnpositionedContextOrder(ContextOrder):
    """The same with placed keys left at the positions they were computed at."""

    family = "inter-unpositioned"
    positioned = False


class WithoutOverlap(CacheCraft):
    """Cache-Craft without β: CFO = α·CCI, whatever stands before the chunk now."""

    family = "cachecraft-without-beta"

    def _overhead(self, prompt: Prompt, evidence: Evidence, index: int) -> float:
        if prompt.spans[index].exact:
            return 0.0
        return min(1.0, self.alpha * context_impact(self._known(prompt, evidence, index)))
