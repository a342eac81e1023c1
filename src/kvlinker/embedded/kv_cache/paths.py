"""Names all that the KV of a sequence depends on, so that what one request computed can serve another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.plan import LinkPlan
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt

Positions = NDArray[np.int64]


class LinkedChunk(NamedTuple):
    """A chunk in a sequence whose KV is its stored one, as far as it was not computed again."""

    key: str
    linked: str
    """By what it was chosen what is computed again: the policy and, where it looks at the question, the whole prompt;
    empty for a chunk that is exact where it stands."""


Items = Mapping[int, Sequence[tuple[LinkedChunk, int]]]
"""By position, the chunks that may begin there, and their lengths."""


@dataclass(frozen=True, eq=False)
class LinkedPath:
    """All that the KV of a sequence depends on: its tokens, where the KV of chunks was used, and how that was linked.

    Two sequences with equal paths have the same KV, whatever their prompts are called.
    """

    tenant: str
    tokens: Positions
    chunks: Items = field(default_factory=dict)
    """The chunks that were linked, one at most at a position."""

    asked: int | None = None
    """The length of the prompt, if what was computed of the chunks depends on all of it."""


def linked_choices(prompt: Prompt, keys: Sequence[str], policy: Policy, lengths: Iterable[int]) -> Items:
    """Return the chunks of the prompt as they may have been linked before, so that it can begin with them.

    ``keys`` are those of its chunks. Where the policy looks at the question, any prompt with which this one begins may
    have been the one that it looked at; ``lengths`` are those of prompts that there were.
    """
    if policy.exact:
        return {}
    linked = [policy.name]
    if looks_at_question(policy):
        digest, position, linked = sha256(), 0, []
        for length in sorted(lengths):
            if length <= len(prompt):
                digest.update(prompt.tokens[position:length].tobytes())
                linked.append(f"{policy.name} {digest.hexdigest()}")
                position = length
    return {
        span.start: tuple((LinkedChunk(key, name), span.length) for name in ([""] if span.exact else linked))
        for span, key in zip(prompt.spans, keys, strict=True)
    }


def linked_path(tenant: str, plan: LinkPlan, keys: Sequence[str]) -> LinkedPath:
    """Return the path of a prompt that is linked by ``plan``; under a policy that drops tokens in some layers, only up
    to the first chunk that is not exact. ``keys`` are those of its chunks."""
    prompt, reused = plan.prompt, plan.prompt.reused
    computed = np.zeros(len(prompt), dtype=np.bool_)
    for begin, end in plan.runs:
        computed[begin:end] = True
    if reused is not None:
        computed[reused.own] = True
    linked, before = plan.policy.name, {} if reused is None else reused.linked
    if looks_at_question(plan.policy):
        linked += f" {sha256(prompt.tokens.tobytes()).hexdigest()}"
    chunks: dict[int, Sequence[tuple[LinkedChunk, int]]] = {}
    for span, key in zip(prompt.spans, keys, strict=True):
        if plan.policy.needs.refines and not span.exact and span.end > prompt.reused_tokens:
            return LinkedPath(tenant, prompt.tokens[: max(span.start, prompt.reused_tokens)], chunks)
        if not computed[span.start : span.end].all():
            chunks[span.start] = (
                (LinkedChunk(key, before.get(span.start, "" if span.exact else linked)), span.length),
            )
    return LinkedPath(tenant, prompt.tokens, chunks, len(prompt) if looks_at_question(plan.policy) else None)


def looks_at_question(policy: Policy) -> bool:
    """Return whether what the policy computes again depends on what stands behind the chunks, so that another question
    about them is to be linked anew."""
    return policy.needs.question_attention or policy.needs.chunk_attention
