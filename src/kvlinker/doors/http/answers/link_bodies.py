"""The parts of answers that describe how their prompts were linked, and the context caches that
they have become."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field

from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import KeptAnswer
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.llm import LLM, Explanation, ReadPrompt

PositionRange = Annotated[list[int], Field(min_length=2, max_length=2)]
"""Positions [begin, end)."""


class ForecastBody(ResponseBody):
    """The times, in seconds, that the policy was settled by; null where nothing is measured yet."""

    load_s: float | None
    prefill_s: float | None
    overlaps: bool


class FreshSegmentBody(ResponseBody):
    """Text of the prompt's own, at positions [``start``, ``end``)."""

    type: Literal["fresh"]
    start: int
    end: int
    tokens: int


class ChunkSegmentBody(ResponseBody):
    """A chunk at positions [``start``, ``end``); ``content`` is a hash of its tokens."""

    type: Literal["chunk"]
    start: int
    end: int
    tokens: int
    context_cache: str | None
    content: str
    exact: bool
    computed_behind_tokens: int


class LayersBody(ResponseBody):
    """Cached positions that layers ``first`` to ``last`` compute again, as ranges [begin, end)."""

    first: int
    last: int
    recomputed_tokens: int
    recomputed: list[PositionRange]


class ScoreBody(ResponseBody):
    """Figures that chose the tokens; ``layer`` is null for figures from before the first layer."""

    name: str
    of: Literal["chunks", "tokens"]
    layer: int | None
    positions: list[int] | None
    values: list[float]


class CostBody(ResponseBody):
    """The cost of linking: tokens are averages over the layers; ``full_flops`` is a full
    prefill's."""

    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    flops: float
    full_flops: float
    flops_ratio: float


class LinkExplanation(ResponseBody):
    """The link of a prompt. ``settled_policy`` replaced ``policy`` by the forecast.

    A layer computes a token again where ``layers`` says so. All other tokens are computed for the
    first time if they are ``fresh`` (ranges [begin, end)), and are otherwise cached. ``attention``
    has the last token's weights by layer and token.
    """

    object: Literal["link.explanation"]
    policy: str
    settled_policy: str
    forecast: ForecastBody | None
    tokens: int
    token_ids: list[int]
    token_texts: list[str] | None
    reused_tokens: int
    fresh: list[PositionRange]
    segments: list[Annotated[FreshSegmentBody | ChunkSegmentBody, Field(discriminator="type")]]
    layers: list[LayersBody]
    scores: list[ScoreBody]
    attention: list[list[float]] | None
    cost: CostBody


class UsedCacheBody(ResponseBody):
    """A context cache in the prompt. ``created`` is true if no earlier request had its text."""

    id: str
    tokens: int
    created: bool


class KeptAnswerBody(ResponseBody):
    """The context cache that the answer has become. If ``id`` is null, ``reason`` says why there is
    none."""

    id: str | None
    tokens: int
    reason: str | None = None


class LinkBody(ResponseBody):
    """How the prompt was linked: the policy, and the prompt's context caches in order.
    ``explanation`` is present if the request asks for it, and ``answer`` if the answer was to be
    kept."""

    policy: str
    context_caches: list[UsedCacheBody]
    explanation: LinkExplanation | None = None
    answer: KeptAnswerBody | None = None


def link_body(
    prompts: Collection[ReadPrompt],
    kept: KeptAnswer | None = None,
    explained: LinkExplanation | None = None,
) -> LinkBody | None:
    """Describe how prompts were linked, with the answer's context cache and the explanation if the
    request asked for them; None if there is nothing of this. Each context cache is listed once."""
    linked = [prompt for prompt in prompts if prompt.linked]
    if not (linked or kept or explained):
        return None
    caches: dict[str, UsedCacheBody] = {}
    for cache in (each for prompt in linked for each in prompt.linked):
        body = UsedCacheBody(id=cache.id, tokens=cache.tokens, created=cache.created)
        caches.setdefault(cache.id, body)
    asked: dict[str, Any] = {} if explained is None else {"explanation": explained}
    if kept is not None:
        why = {} if kept.reason is None else {"reason": kept.reason}
        asked["answer"] = KeptAnswerBody(id=kept.id, tokens=kept.tokens, **why)
    policy = next(iter(linked or prompts)).policy.name
    return LinkBody(policy=policy, context_caches=list(caches.values()), **asked)


def ended_link(
    llm: LLM,
    reads: Collection[ReadPrompt],
    explanation: Explanation | None,
    kept: KeptAnswer | None,
) -> LinkBody | None:
    """Return the ``link_body`` of the end of an answer to the prompts ``reads``. An
    ``explanation``, which is of the only prompt, may take a while."""
    explained = None
    if explanation is not None:
        (read,) = reads
        explained = LinkExplanation.model_validate(llm.described(explanation, read).to_json())
    return link_body(reads, kept, explained)


def created_tokens(read: ReadPrompt, usage: Usage) -> int:
    """Return the number of a prompt's tokens that its request cached as chunks of their own, and
    that were not read."""
    created = sum(cache.tokens for cache in read.linked if cache.created)
    return min(created, usage.prompt_tokens - usage.cached_tokens)
