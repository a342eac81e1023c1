"""The needs of a policy: the evidence that it uses in addition to the prompt, as one value that an
engine offers or does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EVERY_LAYER: Literal["every"] = "every"

RefinedLayers = int | Literal["every"] | None
"""The layers in which a policy's ``refine`` is asked: none, the one with this number, or every
layer."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The evidence to collect for a policy. An engine collects nothing that no policy needs."""

    forecast: bool = False
    """``settle`` looks at how long loading and computing the chunks is expected to take."""

    scores: bool = False
    """``select`` looks at the attention scores that were stored when the chunks' KV was
    computed."""

    sensitivity: bool = False
    """``select`` looks at the tokens' sensitivity among the chunks' scores, where it was measured.
    Unlike ``scores``, nothing is computed again for it."""

    variants: bool = False
    """``arrange`` picks among stored variants of chunks. An engine without variants shows it none;
    one with variants computes those that a request missed when it has time."""

    places: bool = False
    """``arrange`` takes chunks' KV for their places in the row of texts, where it is stored. An
    engine computes what a request missed when it has time."""

    question_attention: bool = False
    """``select`` looks at the question's attention: the fresh tokens pass once over the cached KV
    before it."""

    layers: RefinedLayers = None
    """The layers in which ``refine`` is asked. With 1, a pass over the first layer suffices to show
    everything it looks at."""

    chunk_attention: bool = False
    """``refine`` looks at the question's attention on the chunks in earlier layers."""

    @property
    def reads_scores(self) -> bool:
        """True if ``select`` looks at any of the chunks' scores."""
        return self.scores or self.sensitivity

    @property
    def refines(self) -> bool:
        """True if ``refine`` is asked in any layer."""
        return self.layers is not None

    def refines_in(self, layer: int) -> bool:
        """Return whether ``refine`` is asked in this layer."""
        return self.layers in (EVERY_LAYER, layer)

    def __or__(self, other: Needs) -> Needs:
        """Join the needs of two policies."""
        layers = {needs.layers for needs in (self, other) if needs.refines}
        return Needs(
            forecast=self.forecast or other.forecast,
            scores=self.scores or other.scores,
            sensitivity=self.sensitivity or other.sensitivity,
            variants=self.variants or other.variants,
            places=self.places or other.places,
            question_attention=self.question_attention or other.question_attention,
            layers=EVERY_LAYER if len(layers) > 1 else layers.pop() if layers else None,
            chunk_attention=self.chunk_attention or other.chunk_attention,
        )

    def beyond(self, offered: Needs) -> tuple[str, ...]:
        """Name, in words for users, the needs that ``offered`` lacks; empty if it has all."""
        where = "every layer" if self.layers == EVERY_LAYER else f"layer {self.layers}"
        wanted = {
            "a forecast of loading and computing": self.forecast and not offered.forecast,
            "scores of chunks": self.scores and not offered.scores,
            "the sensitivity of chunks' tokens": self.sensitivity and not offered.sensitivity,
            "variants of chunks": self.variants and not offered.variants,
            "chunks' KV for their places": self.places and not offered.places,
            "the question's attention": self.question_attention and not offered.question_attention,
            f"dropping tokens in {where}": self.refines
            and offered.layers not in (EVERY_LAYER, self.layers),
            "the question's attention on chunks in each layer": self.chunk_attention
            and not offered.chunk_attention,
        }
        return tuple(words for words, missing in wanted.items() if missing)


NOTHING = Needs()
"""The needs of a policy that decides by the prompt alone."""
