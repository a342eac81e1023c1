"""Cache-Craft's scores: how reusable a chunk's KV is behind other chunks than those it was computed behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from kvlinker.chunk_scores import Contextualization


def context_impact(chunk: Contextualization) -> float:
    """CCI = 1 / (1 + exp(-a / b)): from 0.5, for a chunk that looked at nothing before it, to 1 (equations 9 to 11)."""
    outside = sum(before.attention / (chunk.tokens * before.tokens) for before in chunk.context)
    inside = chunk.intra / chunk.tokens**2
    if not outside:
        return 0.5
    return 1 / (1 + math.exp(-min(outside / inside, 700))) if inside else 1.0


def prefix_overlap(chunk: Contextualization, new: Sequence[str]) -> float:
    """β: the share of the chunk's attention on earlier chunks that went to those that stand before it now, whatever
    their order (equation 6). ``new``: contents of the chunks before it.

    Where it was computed behind no chunk: 1 if none stands before it now either, else 0.
    """
    total = sum(before.attention for before in chunk.context)
    if not total:
        return 0.0 if new else float(not chunk.context)
    common = set(new)
    return sum(before.attention for before in chunk.context if before.content in common) / total


def order_penalty(chunk: Contextualization, new: Sequence[str]) -> float:
    """γ: normalised Kendall tau distance of the common chunks' old and new order (equation 7); 0 for fewer than 2."""
    place = {content: index for index, content in reversed(list(enumerate(new)))}
    common = [place[content] for content in dict.fromkeys(b.content for b in chunk.context) if content in place]
    if len(common) < 2:
        return 0.0
    discordant = sum(first > second for first, second in combinations(common, 2))
    return discordant / math.comb(len(common), 2)


def adjusted_overlap(chunk: Contextualization, new: Sequence[str]) -> float:
    """β′ = β·(1 - γ) (equation 8)."""
    return prefix_overlap(chunk, new) * (1 - order_penalty(chunk, new))


def fix_overhead(chunk: Contextualization, new: Sequence[str], alpha: float = 1.0) -> float:
    """CFO = α·CCI·(1 - β′), clipped to [0, 1]: the share of the chunk's tokens to recompute (equation 12)."""
    return min(1.0, alpha * context_impact(chunk) * (1 - adjusted_overlap(chunk, new)))
