"""kvlinker's own policy, which selects the tokens that the question attends to."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Evidence
from kvlinker.linking.parameters import choice, number, percentage
from kvlinker.linking.policy import Needs, Policy
from kvlinker.linking.registry import register
from kvlinker.linking.selection import Score, highest_windows, share
from kvlinker.prompting.segments import Prompt


@register
class Query(Policy):
    """Recompute the r percent of the cached tokens that the prompt's last token attends to most,
    mean over layers and heads, in a first pass of the fresh tokens over the cached KV (ours, after
    ProphetKV and A³). With ``sensitive``, the attention on a token counts by its sensitivity, which
    is how far its KV moved after another text when its chunk was created: nothing is spent on
    tokens that mean the same after any text. Windows of more than one token keep what stands
    together together: those with the most attention are computed again as a whole."""

    family = "query"

    percent: float = percentage()
    weighting: str = choice("what the attention is multiplied by", "none", "sensitive")
    window: int = number("neighbours computed together", 1, 4096, prefix="w", default=1)

    @cached_property
    def needs(self) -> Needs:
        return Needs(question_attention=True, sensitivity=self.weighting == "sensitive")

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        count = share(self.percent, int(prompt.inexact.sum()))
        weights = _attention(evidence)
        if self.weighting == "sensitive":
            weights = weights * _sensitivity(prompt, evidence)
        return highest_windows(weights, count, self.window, prompt.inexact_ranges)

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        positions = np.flatnonzero(prompt.inexact)
        shown = [Score("question_attention", _attention(evidence)[positions], positions)]
        if self.weighting == "sensitive":
            measured = _measured(prompt, evidence)
            known = np.flatnonzero(prompt.inexact & ~np.isnan(measured))
            shown.append(Score("sensitivity", measured[known], known))
        return tuple(shown)


def _attention(evidence: Evidence) -> NDArray[np.float32]:
    attention: NDArray[np.float32] = evidence.question_attention().mean(axis=0)
    return attention


def _sensitivity(prompt: Prompt, evidence: Evidence) -> NDArray[np.float32]:
    """Return the sensitivity of every token, [tokens]; where it was not measured, the mean of the
    others, or 1."""
    found = _measured(prompt, evidence)
    known = ~np.isnan(found)
    return np.where(known, found, found[known].mean() if known.any() else np.float32(1))


def _measured(prompt: Prompt, evidence: Evidence) -> NDArray[np.float32]:
    """Return the sensitivity of every token of which it was measured, NaN for others: [tokens]."""
    found = np.full(len(prompt), np.nan, dtype=np.float32)
    for index, span in enumerate(prompt.spans):
        scores = evidence.scores(index)
        if scores is not None and scores.sensitivity is not None:
            found[span.start : span.end] = scores.sensitivity
    return found
