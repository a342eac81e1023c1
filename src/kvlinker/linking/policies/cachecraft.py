"""Cache-Craft scores how reusable a chunk's KV is after other chunks than those that it was
computed after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunk_scores import Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking.evidence import Evidence, LayerEvidence, Library, Variant
from kvlinker.linking.parameters import choice, number
from kvlinker.linking.policy import EVERY_LAYER, Needs, Policy
from kvlinker.linking.registry import register
from kvlinker.linking.selection import Score, highest
from kvlinker.prompting.segments import Prompt


def context_impact(chunk: Contextualization) -> float:
    """Compute CCI = 1 / (1 + exp(-a / b)): from 0.5, for a chunk that looked at nothing before it,
    to 1 (equations 9 to 11)."""
    outside = sum(before.attention / (chunk.tokens * before.tokens) for before in chunk.context)
    inside = chunk.intra / chunk.tokens**2
    if not outside:
        return 0.5
    return 1 / (1 + math.exp(-min(outside / inside, 700))) if inside else 1.0


def prefix_overlap(chunk: Contextualization, new: Sequence[str]) -> float:
    """Compute β: the share of the chunk's attention on earlier chunks that went to those that stand
    before it now, whatever their order (equation 6).

    ``new`` are the contents of the chunks before it. If it was computed after no chunk, β is 1 if
    none is before it now either, else 0.
    """
    total = sum(before.attention for before in chunk.context)
    if not total:
        return 0.0 if new else float(not chunk.context)
    common = set(new)
    return sum(before.attention for before in chunk.context if before.content in common) / total


def order_penalty(chunk: Contextualization, new: Sequence[str]) -> float:
    """Compute γ: the normalised Kendall tau distance of the common chunks' old and new order
    (equation 7); 0 for fewer than 2."""
    place = {content: index for index, content in reversed(list(enumerate(new)))}
    common = [
        place[content]
        for content in dict.fromkeys(b.content for b in chunk.context)
        if content in place
    ]
    if len(common) < 2:
        return 0.0
    discordant = sum(first > second for first, second in combinations(common, 2))
    return discordant / math.comb(len(common), 2)


def adjusted_overlap(chunk: Contextualization, new: Sequence[str]) -> float:
    """Compute β′ = β·(1 - γ) (equation 8)."""
    return prefix_overlap(chunk, new) * (1 - order_penalty(chunk, new))


def fix_overhead(chunk: Contextualization, new: Sequence[str], alpha: float = 1.0) -> float:
    """Compute CFO = α·CCI·(1 - β′), clipped to [0, 1]: the share of the chunk's tokens to recompute
    (equation 12)."""
    return min(1.0, alpha * context_impact(chunk) * (1 - adjusted_overlap(chunk, new)))


def in_focus(evidence: LayerEvidence, window: int) -> NDArray[np.bool_] | None:
    """Find the active tokens of focused chunks, [active], in the layer in which the focus becomes
    stable; None in all others."""
    if evidence.cached.sum() < evidence.selected:
        return None  # it has been stable before
    stable = stable_focus(evidence.chunk_attention(), window)
    if stable is None or stable[1] != evidence.layer:
        return None
    chunk_of = np.full(len(evidence.prompt), -1)
    for index, span in enumerate(evidence.prompt.spans):
        chunk_of[span.start : span.end] = index
    return np.isin(chunk_of[evidence.positions], list(stable[0]))


def focused_chunks(attention: NDArray[np.floating]) -> frozenset[int]:
    """Find the chunks that the question's ``attention`` [chunks] singles out (Algorithm 1, lines 4
    to 9).

    Sorted in descending order, the differences of neighbours are normalised to p; the set ends
    where the running entropy of p grows most. With fewer than three chunks, and where all get the
    same, all are focused.
    """
    order = np.argsort(-attention, kind="stable")
    gaps = -np.diff(attention[order].astype(np.float64))
    if len(attention) < 3 or not gaps.sum() > 0:
        return frozenset(range(len(attention)))
    share = gaps / gaps.sum()
    growth = -share * np.log(np.where(share > 0, share, 1.0))  # h[i] - h[i-1]
    return frozenset(order[: int(np.argmax(growth[1:])) + 1].tolist())


def stable_focus(attention: NDArray[np.floating], window: int) -> tuple[frozenset[int], int] | None:
    """Find the focused chunks, and the layer after which they were the same for ``window`` layers
    (Algorithm 1); None while they were not.

    ``attention`` [layers, chunks] is the question's in each layer; sums run over the layers.
    """
    history = [focused_chunks(total) for total in np.cumsum(attention, axis=0)]
    for layer in range(window, len(history) + 1):
        if len(set(history[layer - window : layer])) == 1:
            return history[layer - 1], layer
    return None


@register
class CacheCraft(Policy):
    """Recompute of every chunk the CFO = α·CCI·(1 - β') share of its tokens that looked at earlier
    chunks most when its KV was computed (Cache-Craft, section 3); of a chunk that was computed
    after none, the first ones. The variant with the lowest CFO is taken. With ``focus``, tokens of
    chunks that the question does not focus on are dropped once the focus has been the same for w
    layers."""

    family = "cachecraft"

    alpha: float = number(
        "alpha", 0, 1000, whole=False, trials=(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2)
    )
    termination: str = choice("whether tokens of unfocused chunks are dropped", "no", "focus")
    window: int = number("layers that the focus must last", 1, 1000, prefix="w", default=2)

    @cached_property
    def needs(self) -> Needs:
        focuses = self.termination == "focus"
        layers = EVERY_LAYER if focuses else None
        return Needs(scores=True, variants=True, layers=layers, chunk_attention=focuses)

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        return prompt.with_chunks(
            self._best(prompt, index, library) for index in range(len(prompt.chunks))
        )

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
            Score(
                "beta", np.array([prefix_overlap(*pair) for pair in zip(known, new, strict=True)])
            ),
            Score(
                "gamma", np.array([order_penalty(*pair) for pair in zip(known, new, strict=True)])
            ),
            Score("cfo", np.array(overheads)),
            *inter,
        )

    @staticmethod
    def _best(prompt: Prompt, index: int, library: Library) -> Chunk:
        """Find the variant with the lowest CFO; of equal ones, one that is exact."""
        chunk = prompt.chunks[index]
        variants = library.variants(chunk)
        if not variants:
            return chunk
        new, before = prompt.contents[:index], tuple(prompt.tokens_before(index))
        stored = [Variant(chunk, Contextualization(len(chunk), intra=0.0)), *variants]
        best = min(
            stored,
            key=lambda known: (
                fix_overhead(known.contextualization, new),
                known.chunk.prefix != before,
            ),
        )
        return best.chunk

    def _known(self, prompt: Prompt, evidence: Evidence, index: int) -> Contextualization:
        scores = evidence.scores(index)
        return (
            Contextualization(len(prompt.chunks[index]), intra=0.0)
            if scores is None
            else scores.contextualization
        )

    def _overhead(self, prompt: Prompt, evidence: Evidence, index: int) -> float:
        if prompt.spans[index].exact:
            return 0.0
        return fix_overhead(
            self._known(prompt, evidence, index), prompt.contents[:index], self.alpha
        )

    def refine(self, evidence: LayerEvidence) -> NDArray[np.bool_] | None:
        return in_focus(evidence, self.window) if self.termination == "focus" else None
