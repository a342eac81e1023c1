"""Controls select tokens without knowing the prompt; every clever policy must beat them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Evidence
from kvlinker.linking.parameters import percentage
from kvlinker.linking.policy import Needs, Policy
from kvlinker.linking.registry import register
from kvlinker.linking.selection import Score, highest, share
from kvlinker.prompting.segments import Prompt


@register
class Random(Policy):
    """Recompute r percent of every inexact chunk's tokens, at random (Cache-Craft's Random-Recomp).

    The choice depends on the prompt's tokens alone, so that a request gives the same answer every
    time.
    """

    family = "random"

    percent: float = percentage()

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        generator = np.random.default_rng(prompt.tokens.astype(np.uint32))
        for span in prompt.spans:
            if not span.exact:
                chosen = generator.permutation(span.length)[: share(self.percent, span.length)]
                selected[span.start + chosen] = True
        return selected


@register
class HeavyHitters(Policy):
    """Recompute the r percent of every inexact chunk's tokens that the chunk itself attends to most
    (Cache-Craft's Prefill-H2O, after the heavy hitters of H2O)."""

    family = "h2o"
    needs = Needs(scores=True)

    percent: float = percentage()

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for index, span in enumerate(prompt.spans):
            scores = evidence.scores(index)
            if not span.exact:
                received = np.zeros(span.length) if scores is None else scores.received
                selected[span.start : span.end] = highest(
                    received, share(self.percent, span.length)
                )
        return selected

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        return tuple(
            Score("received_attention", scores.received, np.arange(span.start, span.end))
            for index, span in enumerate(prompt.spans)
            if (scores := evidence.scores(index)) is not None
        )
