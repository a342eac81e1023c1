"""What a policy did to a prompt, and why: an immutable value that can be written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Forecast
from kvlinker.linking.plan import ranges
from kvlinker.linking.selection import Score
from kvlinker.prompt.segments import CachedSegment, Prompt


@dataclass(frozen=True, slots=True)
class LinkedSegment:
    """A part of the prompt: fresh text, or a chunk with what is known of its KV.

    ``exact``: its KV is what this very prompt makes of it. ``computed_behind``: how many tokens stood before it when
    its KV was computed. ``context_cache``: the id by which the caller named it, if one did.
    """

    kind: Literal["fresh", "chunk"]
    start: int
    tokens: int
    content: str | None = None
    exact: bool | None = None
    computed_behind: int | None = None
    context_cache: str | None = None


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The ``recomputed`` ranges [begin, end) of cached tokens, the same in layers ``first`` to ``last``."""

    first: int
    last: int
    recomputed: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(end - begin for begin, end in self.recomputed)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What linking costs. Token counts are averages over the layers; ``full_flops`` is a full prefill's."""

    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    flops: float
    full_flops: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one prompt is linked under one policy. ``settled``: the policy that took its place, going by ``forecast``;
    the same, and None, where it does not look at forecasts."""

    policy: str
    settled: str
    forecast: Forecast | None
    tokens: int
    segments: tuple[LinkedSegment, ...]
    layers: tuple[LayerRange, ...]
    scores: tuple[Score, ...]
    cost: LinkCost

    def with_context_caches(self, ids: Mapping[str, str]) -> Explanation:
        """The same with the chunks' ids; ``ids`` has them by content."""
        named = tuple(
            replace(segment, context_cache=ids.get(segment.content)) if segment.content else segment
            for segment in self.segments
        )
        return replace(self, segments=named)

    def to_json(self) -> dict[str, Any]:
        cost = self.cost
        return {
            "object": "link.explanation",
            "policy": self.policy,
            "settled_policy": self.settled,
            "forecast": self.forecast
            and {
                "load_s": self.forecast.load,
                "prefill_s": self.forecast.prefill,
                "overlaps": self.forecast.overlaps,
            },
            "tokens": self.tokens,
            "segments": [
                {
                    "type": segment.kind,
                    "start": segment.start,
                    "end": segment.start + segment.tokens,
                    "tokens": segment.tokens,
                }
                | (
                    {
                        "context_cache": segment.context_cache,
                        "content": segment.content,
                        "exact": segment.exact,
                        "computed_behind_tokens": segment.computed_behind,
                    }
                    if segment.kind == "chunk"
                    else {}
                )
                for segment in self.segments
            ],
            "layers": [
                {
                    "first": layer.first,
                    "last": layer.last,
                    "recomputed_tokens": layer.tokens,
                    "recomputed": [list(part) for part in layer.recomputed],
                }
                for layer in self.layers
            ],
            "scores": [score.to_json() for score in self.scores],
            "cost": {
                "cached_tokens": cost.cached_tokens,
                "recomputed_tokens": cost.recomputed_tokens,
                "fresh_tokens": cost.fresh_tokens,
                "flops": cost.flops,
                "full_flops": cost.full_flops,
                "flops_ratio": cost.flops / cost.full_flops if cost.full_flops else 1.0,
            },
        }


def linked_segments(prompt: Prompt) -> tuple[LinkedSegment, ...]:
    """All segments with tokens, in order."""
    found = []
    start = 0
    spans = iter(prompt.spans)
    for segment in prompt.segments:
        size = len(segment.tokens)
        if isinstance(segment, CachedSegment):
            chunk = segment.chunk
            found.append(LinkedSegment("chunk", start, size, chunk.content, next(spans).exact, len(chunk.prefix)))
        elif size:
            found.append(LinkedSegment("fresh", start, size))
        start += size
    return tuple(found)


def layer_ranges(prompt: Prompt, masks: Sequence[NDArray[np.bool_]]) -> tuple[LayerRange, ...]:
    """The recomputed cached tokens, with neighbouring layers that are alike taken together."""
    found: list[LayerRange] = []
    for layer, mask in enumerate(masks):
        recomputed = ranges(mask & prompt.cached)
        if found and found[-1].recomputed == recomputed:
            found[-1] = LayerRange(found[-1].first, layer, recomputed)
        else:
            found.append(LayerRange(layer, layer, recomputed))
    return tuple(found)
