"""Baselines for comparison: the two ends of the scale, the ablation of positions, and prefix
caching."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunks import Chunk
from kvlinker.linking.evidence import Evidence, Library
from kvlinker.linking.policy import Needs, Policy
from kvlinker.linking.registry import register
from kvlinker.prompting.segments import Prompt


@register
class Full(Policy):
    """Recompute everything; this is the quality oracle."""

    family = "full"
    exact = True
    reach = 0

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        return np.ones(len(prompt), dtype=np.bool_)


@register
class Naive(Policy):
    """Recompute nothing (EPIC's Naive, Prompt Cache, Cache-Craft's Full-Cache)."""

    family = "naive"
    reach = 0

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        return np.zeros(len(prompt), dtype=np.bool_)


@register
class NaiveUnpositioned(Naive):
    """Recompute nothing, and leave keys at the positions they were computed at (Cache-Craft, Table
    3)."""

    family = "naive-unpositioned"
    positioned = False


@register
class Prefix(Policy):
    """Keep the chunks at the start that are exact, recompute all that follows: prefix caching, as
    in vLLM and SGLang. A chunk after others is exact where a variant of it was computed after just
    these."""

    family = "prefix"
    reach = 0
    needs = Needs(variants=True)

    reorders: ClassVar[bool] = False

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        @cache
        def stored(index: int) -> tuple[Chunk, ...]:
            chunk = prompt.chunks[index]
            return (chunk, *(variant.chunk for variant in library.variants(chunk)))

        sizes = accumulate(map(len, prompt.chunks), initial=0)
        fresh = [span.start - size for span, size in zip(prompt.spans, sizes, strict=False)]
        best: list[Chunk] = []
        partial: list[tuple[list[Chunk], list[int]]] = [([], list(range(len(prompt.chunks))))]
        longest = -1
        tried: set[tuple[tuple[int, ...], ...]] = set()
        while partial:
            found, rest = partial.pop()
            texts = tuple(chunk.tokens for chunk in found)
            if texts in tried:  # by another of several chunks that are alike
                continue
            tried.add(texts)
            arranged = [*found, *(prompt.chunks[index] for index in rest)]
            if len(found) > longest:
                longest, best = len(found), arranged
            if not rest or longest == len(prompt.chunks):
                continue
            start = fresh[len(found)] + sum(map(len, found))
            following = [
                (chunk, index)
                for index in reversed(rest if self.reorders else rest[:1])
                for chunk in stored(index)
                if len(chunk.prefix) == start
            ]
            if following:
                before = tuple(prompt.with_chunks(arranged).tokens_before(len(found)))
                partial += [
                    ([*found, chunk], [other for other in rest if other != index])
                    for chunk, index in following
                    if chunk.prefix == before
                ]
        return prompt.with_chunks(best)

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        return prompt.inexact


@register
class SetPrefix(Prefix):
    """Like ``prefix``, after putting the chunks into the order of the longest prefix that is cached
    (Cache-Craft's Set-Cache). The model then reads them in that order."""

    family = "set-prefix"
    reorders = True
