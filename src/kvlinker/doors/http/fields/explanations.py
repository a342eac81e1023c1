"""The body that explains how a prompt was linked, for /v1/link/explain and for answers with
``explain``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvlinker.doors.http.fields.bodies import ResponseBody

PositionRange = Annotated[list[int], Field(min_length=2, max_length=2)]
"""Positions [begin, end)."""


class ForecastBody(ResponseBody):
    """The times, in seconds, by which a policy settled; null if nothing was measured yet."""

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
    """Figures by which tokens were chosen; ``layer`` is null for before the first one."""

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
    """The link of a prompt; ``settled_policy`` replaced ``policy`` by the forecast.

    A token is computed again in a layer where ``layers`` says so, else computed for the first time
    where it is ``fresh`` (ranges [begin, end)), and else cached. ``attention`` has the last token's
    weights by layer and token.
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
