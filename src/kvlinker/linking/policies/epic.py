"""EPIC's static policies select a fixed number of tokens per chunk, whatever its length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Evidence
from kvlinker.linking.parameters import number
from kvlinker.linking.policy import Policy
from kvlinker.linking.registry import register
from kvlinker.prompting.segments import Prompt


@register
class LegoLink(Policy):
    """Recompute the first k tokens of every chunk (EPIC, ICML 2025), where an independently
    computed chunk keeps its attention sink, which disappears once those tokens are computed with
    attention to the text before them."""

    family = "legolink"

    tokens: int = number("tokens", 1, 4096)

    @property
    def reach(self) -> int:
        return self.tokens

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for span in prompt.spans:
            if not span.exact:
                selected[span.start : min(span.start + self.tokens, span.end)] = True
        return selected


@register
class AttnLink(Policy):
    """Recompute k/2 tokens on each side of every chunk boundary (EPIC, first version, section 4.2).

    A boundary is the start of a chunk that is not exact. With an odd k the later side gets the odd
    token.
    """

    family = "attnlink"

    tokens: int = number("tokens", 2, 4096)

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        before = self.tokens // 2
        after = self.tokens - before
        previous = None
        for span in prompt.spans:
            if not span.exact:
                selected[span.start : min(span.start + after, span.end)] = True
                if previous is not None and not previous.exact:
                    selected[max(previous.end - before, previous.start) : previous.end] = True
            previous = span
        return selected
