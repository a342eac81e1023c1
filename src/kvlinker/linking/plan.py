"""The link plan: an immutable value that says what to place where and what to compute, for one request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.chunks import Chunk
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt


@dataclass(frozen=True, slots=True)
class Placement:
    """Copy a chunk's tokens [first, last) into the prompt, the chunk's token i at position ``start + i``.

    ``rotary_start``: keys get the rotary embedding of position ``rotary_start + i`` (``start``, but for ablations).
    """

    chunk: Chunk
    start: int
    first: int
    last: int
    rotary_start: int


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """What to place and what to compute.

    ``runs``: maximal ranges [begin, end) of positions to compute, ascending. Every position is in a run, in a
    placement, or in both (then it is placed first and overwritten).
    """

    policy: Policy
    length: int
    placements: tuple[Placement, ...]
    runs: tuple[tuple[int, int], ...]
    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int


def make_plan(prompt: Prompt, policy: Policy) -> LinkPlan:
    """Turn a policy's selection into a plan.

    Fresh tokens and the prompt's last token (its logits are needed) are always computed. A chunk's leading and
    trailing computed tokens are not placed, unless the policy refines and thus compares old and new.
    """
    length = len(prompt)
    computed = policy.select(prompt).copy()
    fresh = np.ones(length, dtype=np.bool_)
    for span in prompt.spans:
        fresh[span.start : span.end] = False
    computed |= fresh
    computed[-1:] = True
    placements = []
    for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
        kept = np.flatnonzero(~computed[span.start : span.end])
        if policy.refine_layers:
            first, last = 0, span.length
        elif kept.size:
            first, last = int(kept[0]), int(kept[-1]) + 1
        else:
            continue
        rotary_start = span.start if policy.positioned else len(chunk.prefix)
        placements.append(Placement(chunk, span.start, first, last, rotary_start))
    fresh_tokens = int(fresh.sum())
    recomputed_tokens = int(computed.sum()) - fresh_tokens
    return LinkPlan(
        policy=policy,
        length=length,
        placements=tuple(placements),
        runs=ranges(computed),
        cached_tokens=length - fresh_tokens - recomputed_tokens,
        recomputed_tokens=recomputed_tokens,
        fresh_tokens=fresh_tokens,
    )


def ranges(mask: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Maximal ranges [begin, end) where ``mask`` is true."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return tuple((int(begin), int(end)) for begin, end in edges.reshape(-1, 2))
