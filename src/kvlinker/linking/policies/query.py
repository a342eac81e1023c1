"""kvlinker's own policy, which selects the tokens that the question attends to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Evidence
from kvlinker.linking.needs import Needs
from kvlinker.linking.parameters import percentage
from kvlinker.linking.policy import Policy
from kvlinker.linking.registry import register
from kvlinker.linking.selection import Score, highest, share
from kvlinker.prompt.segments import Prompt


@register
class Query(Policy):
    """Recompute the r percent of the cached tokens that the prompt's last token attends to most, mean over layers and
    heads, in a first pass of the fresh tokens over the cached KV (ours, after ProphetKV and A³)."""

    family = "query"
    needs = Needs(question_attention=True)

    percent: float = percentage()

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        count = share(self.percent, int(prompt.inexact.sum()))
        return highest(self._attention(evidence), count, among=prompt.inexact)

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        positions = np.flatnonzero(prompt.inexact)
        return (Score("question_attention", self._attention(evidence)[positions], positions),)

    @staticmethod
    def _attention(evidence: Evidence) -> NDArray[np.float32]:
        attention: NDArray[np.float32] = evidence.question_attention().mean(axis=0)
        return attention
