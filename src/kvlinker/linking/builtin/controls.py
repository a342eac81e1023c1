"""Controls: selections that know nothing, which every clever one must beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.policy import CountPolicy
from kvlinker.linking.registry import register
from kvlinker.prompt.segments import Prompt


@register
class Random(CountPolicy):
    """r percent of every inexact chunk's tokens, at random (Cache-Craft's Random-Recomp).

    The choice depends on the prompt's tokens alone, so that a request gives the same answer every time.
    """

    family = "random"
    unit = "percent"
    minimum = 0
    maximum = 100

    def select(self, prompt: Prompt) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        generator = np.random.default_rng(prompt.tokens.astype(np.uint32))
        for span in prompt.spans:
            if not span.exact:
                size = -(-span.length * self.count // 100)
                selected[span.start + generator.permutation(span.length)[:size]] = True
        return selected
