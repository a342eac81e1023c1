"""Cache-Craft: of every chunk a share that its context demands, the tokens that looked at other chunks most."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.chunk_scores import Contextualization
from kvlinker.chunks import Chunk
from kvlinker.linking.evidence import Evidence, LayerEvidence
from kvlinker.linking.focus import in_focus
from kvlinker.linking.library import Library, Variant
from kvlinker.linking.parameters import choice, number
from kvlinker.linking.policy import Policy
from kvlinker.linking.registry import register
from kvlinker.linking.reuse import context_impact, fix_overhead, order_penalty, prefix_overlap
from kvlinker.linking.score import Score
from kvlinker.linking.selection import highest
from kvlinker.prompt.segments import Prompt


@register
class CacheCraft(Policy):
    """Of every chunk the CFO = α·CCI·(1 - β') share of its tokens that looked at earlier chunks most when its KV was
    computed (Cache-Craft, section 3); of a chunk that was computed behind none, the first ones. The variant with the
    lowest CFO is taken. With ``focus``, tokens of chunks that the question does not focus on are dropped once the
    focus has been the same for w layers."""

    family = "cachecraft"
    uses_scores = True
    uses_variants = True

    alpha: float = number("alpha", 0, 1000, whole=False)
    termination: str = choice("whether tokens of unfocused chunks are dropped", "no", "focus")
    window: int = number("layers that the focus must last", 1, 1000, prefix="w", default=3)

    @property
    def refines(self) -> bool:  # type: ignore[override]
        return self.termination == "focus"

    @property
    def watches(self) -> bool:  # type: ignore[override]
        return self.refines

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        return prompt.with_chunks(self._best(prompt, index, library) for index in range(len(prompt.chunks)))

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for index, span in enumerate(prompt.spans):
            scores = evidence.scores(index)
            looked = np.zeros(span.length) if scores is None else scores.inter
            count = int(np.ceil(round(self._overhead(prompt, evidence, index) * span.length, 6)))
            selected[span.start : span.end] = highest(looked, count)
        return selected

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        known = [self._known(prompt, evidence, index) for index in range(len(prompt.spans))]
        new = [prompt.contents[:index] for index in range(len(known))]
        overheads = [self._overhead(prompt, evidence, index) for index in range(len(known))]
        inter = [
            Score("inter_attention", scores.inter, np.arange(span.start, span.end))
            for index, span in enumerate(prompt.spans)
            if (scores := evidence.scores(index)) is not None
        ]
        return (
            Score("cci", np.array([context_impact(chunk) for chunk in known])),
            Score("beta", np.array([prefix_overlap(*pair) for pair in zip(known, new, strict=True)])),
            Score("gamma", np.array([order_penalty(*pair) for pair in zip(known, new, strict=True)])),
            Score("cfo", np.array(overheads)),
            *inter,
        )

    @staticmethod
    def _best(prompt: Prompt, index: int, library: Library) -> Chunk:
        """The variant with the lowest CFO; of equal ones, one that is exact."""
        chunk, new = prompt.chunks[index], prompt.contents[:index]
        before = tuple(prompt.tokens_before(index))
        stored = [Variant(chunk, Contextualization(len(chunk), intra=0.0)), *library.variants(chunk)]
        best = min(stored, key=lambda known: (fix_overhead(known.contextualization, new), known.chunk.prefix != before))
        return best.chunk

    def _known(self, prompt: Prompt, evidence: Evidence, index: int) -> Contextualization:
        scores = evidence.scores(index)
        return Contextualization(len(prompt.chunks[index]), intra=0.0) if scores is None else scores.contextualization

    def _overhead(self, prompt: Prompt, evidence: Evidence, index: int) -> float:
        if prompt.spans[index].exact:
            return 0.0
        return fix_overhead(self._known(prompt, evidence, index), prompt.contents[:index], self.alpha)

    def refine(self, evidence: LayerEvidence) -> NDArray[np.bool_] | None:
        return in_focus(evidence, self.window) if self.refines else None
