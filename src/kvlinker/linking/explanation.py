"""Explanations of what a policy did to a prompt, and why; they are immutable and can be written as
JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Forecast
from kvlinker.linking.notebook import State, tokens_html
from kvlinker.linking.selection import Score
from kvlinker.prompting.segments import CachedSegment, Prompt, Range, ranges

ATTENTION_DIGITS = 3
"""The number of significant digits of attention weights in JSON, of which there are many."""


@dataclass(frozen=True, slots=True)
class ExplainedSegment:
    """A part of the prompt: fresh text, or a chunk. The last four fields are a chunk's, and None
    for fresh text."""

    kind: Literal["fresh", "chunk"]
    start: int
    tokens: int

    content: str | None = None
    """SHA-256 (hex) of its token ids."""

    exact: bool | None = None
    """True if its KV is exactly what a full prefill of this prompt would compute."""

    computed_behind: int | None = None
    """The number of tokens that stood before it when its KV was computed."""

    context_cache: str | None = None
    """The id by which the caller named it, if one did."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The ranges [begin, end) of cached tokens that are ``recomputed``, the same in layers
    ``first`` to ``last``."""

    first: int
    last: int
    recomputed: tuple[Range, ...]

    @property
    def tokens(self) -> int:
        return sum(end - begin for begin, end in self.recomputed)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost of linking. Token counts are averages over the layers; ``full_flops`` is the cost of
    a full prefill."""

    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    flops: float
    full_flops: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of how one prompt is linked under one policy."""

    policy: str
    """The name of the request's policy."""

    settled: str
    """The name of the policy that replaced it by the ``forecast``; the same name where it does not
    look at one."""

    forecast: Forecast | None
    token_ids: tuple[int, ...]
    """The prompt as the policy arranged it."""

    reused_tokens: int
    """The number of tokens at the beginning that an earlier request left, chunks and fresh tokens
    alike."""

    fresh: tuple[Range, ...]
    """Positions [begin, end) whose KV was computed for the first time, in all layers that do not
    recompute them: no chunk's, or one's whose KV was computed for this very request."""

    segments: tuple[ExplainedSegment, ...]
    layers: tuple[LayerRange, ...]
    scores: tuple[Score, ...]
    cost: LinkCost

    attention: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    """The last token's attention on every token in the pass that gives the answer: [layers,
    tokens], mean over heads; None if it was not asked for, or the engine does not measure it."""

    texts: tuple[str, ...] | None = None
    """The text of each token; joined, they are the prompt's. None until ``with_texts``."""

    @property
    def tokens(self) -> int:
        """The number of the prompt's tokens."""
        return len(self.token_ids)

    @property
    def states(self) -> tuple[State, ...]:
        """How each token was computed: [tokens]. One that any layer computed again is
        recomputed."""
        found: list[State] = ["cached"] * self.tokens
        for begin, end in self.fresh:
            found[begin:end] = ["fresh"] * (end - begin)
        for layer in self.layers:
            for begin, end in layer.recomputed:
                found[begin:end] = ["recomputed"] * (end - begin)
        return tuple(found)

    def _repr_html_(self) -> str | None:
        """Return the prompt for a notebook, its tokens coloured by how they were computed; None
        without ``texts``."""
        return None if self.texts is None else tokens_html(self.texts, self.states)

    def with_context_caches(self, ids: Mapping[str, str]) -> Explanation:
        """Add the ids of the chunks' context caches; ``ids`` has them by content."""
        named = tuple(
            replace(segment, context_cache=ids.get(segment.content)) if segment.content else segment
            for segment in self.segments
        )
        return replace(self, segments=named)

    def with_texts(self, texts: Sequence[str]) -> Explanation:
        """Add the text of each token."""
        return replace(self, texts=tuple(texts))

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON, in the form of the HTTP API."""
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
            "token_ids": list(self.token_ids),
            "token_texts": None if self.texts is None else list(self.texts),
            "reused_tokens": self.reused_tokens,
            "fresh": [list(part) for part in self.fresh],
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
            "attention": None if self.attention is None else _rounded(self.attention),
            "cost": asdict(cost)
            | {"flops_ratio": cost.flops / cost.full_flops if cost.full_flops else 1.0},
        }


class PromptCost(Protocol):
    """Counts the arithmetic that computing tokens of a prompt costs."""

    def flops(self, masks: Sequence[NDArray[np.bool_]]) -> float:
        """Count floating point operations of computing, in each layer, the positions where its mask
        [length] is true."""


def _rounded(weights: NDArray[np.float32]) -> list[list[float]]:
    """Return weights [layers, tokens] as short numbers."""
    return [
        [float(f"{weight:.{ATTENTION_DIGITS}g}") for weight in layer] for layer in weights.tolist()
    ]


def linked_segments(prompt: Prompt) -> tuple[ExplainedSegment, ...]:
    """Describe all segments with tokens, in order."""
    found = []
    start = 0
    spans = iter(prompt.spans)
    for segment in prompt.segments:
        size = len(segment.tokens)
        if isinstance(segment, CachedSegment):
            chunk = segment.chunk
            found.append(
                ExplainedSegment(
                    "chunk", start, size, chunk.content, next(spans).exact, len(chunk.prefix)
                )
            )
        elif size:
            found.append(ExplainedSegment("fresh", start, size))
        start += size
    return tuple(found)


def layer_ranges(prompt: Prompt, masks: Sequence[NDArray[np.bool_]]) -> tuple[LayerRange, ...]:
    """Find the recomputed cached tokens by each layer's mask of computed positions, [length], with
    neighbouring layers that are alike taken together."""
    found: list[LayerRange] = []
    for layer, mask in enumerate(masks):
        recomputed = ranges(mask & prompt.cached)
        if found and found[-1].recomputed == recomputed:
            found[-1] = LayerRange(found[-1].first, layer, recomputed)
        else:
            found.append(LayerRange(layer, layer, recomputed))
    return tuple(found)
