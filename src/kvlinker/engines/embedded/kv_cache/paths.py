"""Names everything that the KV of a sequence depends on, so that the KV of one request can serve
another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.plan import LinkPlan
from kvlinker.linking.policy import Policy
from kvlinker.prompting.segments import ChunkSpan, Prompt, Range

Positions = NDArray[np.int64]


class PathChunk(NamedTuple):
    """A chunk in a sequence whose KV is its stored one, as far as it was not computed again."""

    key: str
    linked: str
    """The basis on which the recomputed tokens were chosen: the policy and, where it looks at the
    question, the whole prompt; empty for a chunk that is exact where it stands."""


@dataclass(frozen=True, eq=False)
class SequencePath:
    """All that the KV of a sequence depends on: its tokens, where the KV of chunks was used, and
    how that was linked.

    Two sequences with equal paths have the same KV, whatever their prompts are called.
    """

    tenant: str
    tokens: Positions
    chunks: Mapping[int, tuple[PathChunk, int]] = field(default_factory=dict)
    """By position, the chunk that was linked there, and its length in tokens."""

    asked: int | None = None
    """The length of the prompt, if the recomputed tokens of chunks depend on all of it."""

    together: Range | None = None
    """The positions of the chunks whose recomputed tokens were chosen among all of theirs: a
    beginning has all of these chunks or none. None where each chunk's are chosen by itself."""

    def up_to(self, last: int) -> SequencePath:
        """Return the path up to position ``last``, and to the end of the chunk there."""
        chunks = {start: chunk for start, chunk in self.chunks.items() if start <= last}
        end = max([last + 1, *(start + length for start, (_, length) in chunks.items())])
        return replace(self, tokens=self.tokens[:end], chunks=chunks)

    def computed_to(self, end: int) -> SequencePath:
        """Return the path of a prompt that is computed up to position ``end``: without a chunk that
        is linked in part."""
        if self.together is not None and self.together[0] < end < self.together[1]:
            end = self.together[0]
        for start, (_, length) in self.chunks.items():
            if start < end < start + length:
                end = start
        chunks = {start: chunk for start, chunk in self.chunks.items() if start < end}
        return replace(self, tokens=self.tokens[:end], chunks=chunks)


class PathChoices:
    """Lists how each chunk of a prompt may have been linked before, so that the prompt can begin
    with it.

    Where the policy looks at the question, any prompt with which this one begins may have been the
    one that it looked at. Nothing is made for chunks that a look-up does not come to: it holds the
    scheduler's lock, and there may be many chunks, and many such prompts.
    """

    def __init__(
        self, prompt: Prompt, keys: Sequence[str], policy: Policy, lengths: Iterable[int]
    ) -> None:
        """``keys`` are those of the prompt's chunks; ``lengths``, in tokens, those of the prompts
        at which policies looked."""
        spans: Iterable[tuple[ChunkSpan, str]] = (
            () if policy.exact else zip(prompt.spans, keys, strict=True)
        )
        self._prompt = prompt
        self._policy = policy
        self._lengths = lengths
        self._chunks = {span.start: (span, key) for span, key in spans}

    def at(self, position: int) -> list[PathChunk]:
        """Return all that the chunk at the position may have been linked as; nothing if no chunk
        begins."""
        if position not in self._chunks:
            return []
        span, key = self._chunks[position]
        return [PathChunk(key, linked) for linked in self._ways(span)]

    def length(self, chunk: PathChunk, position: int) -> int:
        """Return the length in tokens of the prompt's chunk at the position if it may have been
        linked as ``chunk``; else 0."""
        if position not in self._chunks:
            return 0
        span, key = self._chunks[position]
        return span.length if chunk.key == key and chunk.linked in self._ways(span) else 0

    def _ways(self, span: ChunkSpan) -> Collection[str]:
        """Return what ``PathChunk.linked`` may be of the chunk in this span."""
        return ("",) if span.exact else self._inexact_ways

    @cached_property
    def _inexact_ways(self) -> Collection[str]:
        if not looks_at_question(self._policy):
            return (self._policy.name,)
        digest, position, ways = sha256(), 0, dict[str, None]()
        for length in sorted(self._lengths):
            if length <= len(self._prompt):
                digest.update(self._prompt.tokens[position:length].tobytes())
                ways[f"{self._policy.name} {digest.hexdigest()}"] = None
                position = length
        return ways.keys()


def linked_path(tenant: str, plan: LinkPlan, keys: Sequence[str]) -> SequencePath:
    """Return the path of a prompt that is linked by ``plan``; under a policy that drops tokens in
    some layers, only up to the first chunk that is not exact. ``keys`` are those of its chunks."""
    prompt, reused = plan.prompt, plan.prompt.reused
    computed = np.zeros(len(prompt), dtype=np.bool_)
    for begin, end in plan.runs:
        computed[begin:end] = True
    if reused is not None:
        computed[reused.own] = True
    linked, before = plan.policy.name, {} if reused is None else reused.linked
    if looks_at_question(plan.policy):
        linked += f" {sha256(prompt.tokens.tobytes()).hexdigest()}"
    chunks: dict[int, tuple[PathChunk, int]] = {}
    for span, key in zip(prompt.spans, keys, strict=True):
        if plan.policy.needs.refines and not span.exact and span.end > prompt.reused_tokens:
            return SequencePath(
                tenant, prompt.tokens[: max(span.start, prompt.reused_tokens)], chunks
            )
        if not computed[span.start : span.end].all():
            chunks[span.start] = (
                PathChunk(key, before.get(span.start, "" if span.exact else linked)),
                span.length,
            )
    changed = [span for span in prompt.spans if not span.exact and span.end > prompt.reused_tokens]
    return SequencePath(
        tenant,
        prompt.tokens,
        chunks,
        len(prompt) if looks_at_question(plan.policy) else None,
        (changed[0].start, changed[-1].end) if changed and plan.policy.reach is None else None,
    )


def looks_at_question(policy: Policy) -> bool:
    """Return whether the policy's recomputed tokens depend on the text after the chunks, so that
    another question about them must be linked again."""
    return policy.needs.question_attention or policy.needs.chunk_attention
