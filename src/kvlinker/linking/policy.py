"""The interface of a linking policy, which decides which cached tokens of a prompt are computed
again; the evidence that a policy needs for it; and the union of several policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import product
from operator import or_
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import PolicyError
from kvlinker.linking.evidence import Evidence, Forecast, LayerEvidence, Library
from kvlinker.linking.parameters import Number, choice, declared, number, percentage
from kvlinker.linking.selection import Score
from kvlinker.prompting.segments import Prompt

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

    reads_scores: bool = field(init=False)
    """``select`` looks at any of the chunks' scores."""

    refines: bool = field(init=False)
    """``refine`` is asked in any layer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads_scores", self.scores or self.sensitivity)
        object.__setattr__(self, "refines", self.layers is not None)

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


@dataclass_transform(
    frozen_default=True,
    field_specifiers=(number, percentage, choice),
)
class Policy(ABC):
    """The base of all policies. Subclasses become frozen dataclasses, whose fields are the policy's
    parameters.

    A policy holds no state. It is asked up to four times: ``arrange`` picks the KV, ``settle`` how
    much to compute, ``select`` the tokens before the first layer, ``refine`` those that are still
    computed in every layer. Cached tokens that it does not select, or drops in a layer, keep their
    cached KV in this layer and all that follow.
    """

    family: ClassVar[str]
    """The registered name, such as ``legolink``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, repr=False)(cls)

    def __post_init__(self) -> None:
        """Raises PolicyError for a parameter out of its range; numbers get the digits that are
        written."""
        for name, parameter in declared(type(self)).items():
            value = getattr(self, name)
            if not parameter.accepts(value):
                shown = f"{value:.12g}" if isinstance(value, float) else repr(value)
                raise PolicyError(
                    f"Policy {self.name!r}: {name} is {shown}, but must be {parameter.allowed}.",
                    param="link.policy",
                )
            if isinstance(parameter, Number):
                object.__setattr__(self, name, parameter.rounded(value))

    @cached_property
    def name(self) -> str:
        """The canonical name, which parses back to an equal policy; it leaves defaults out."""
        words = [
            parameter.write(getattr(self, name))
            for name, parameter in declared(type(self)).items()
            if getattr(self, name) != parameter.default
        ]
        return "-".join([self.family, *words])

    @property
    def needs(self) -> Needs:
        """All that the policy looks at besides the prompt; nothing by default.

        A subclass says ``needs = Needs(scores=True)``, or makes it a property where it depends on
        parameters.
        """
        return NOTHING

    @property
    def positioned(self) -> bool:
        """True if placed keys get their new positions; False leaves those that they were computed
        at (an ablation)."""
        return True

    @property
    def exact(self) -> bool:
        """True if it computes every token, so that it reuses only KV that was computed exactly."""
        return False

    @property
    def reach(self) -> int | None:
        """The most of a chunk's first tokens that ``select`` picks, where it picks those, or the
        whole chunk, and nothing else; None if it may pick any token.

        Models whose layers keep a state link nothing else, unless their settings keep every token.
        """
        return None

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies that a union consists of; any other policy is its only part."""
        return (self,)

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        """Return the prompt with variants of its chunks, or with its chunks in another order. By
        default it is unchanged."""
        return prompt

    def settle(self, forecast: Forecast) -> Policy:
        """Return the policy to use for a prompt with this forecast; by default this one."""
        return self

    @abstractmethod
    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        """Select the positions to compute again: a mask, [length]. Fresh positions are computed
        whatever it says.

        ``prompt.inexact`` are the positions that may need repair.
        """

    def refine(self, evidence: LayerEvidence) -> NDArray[np.bool_] | None:
        """Decide which active tokens stay from this layer's attention on: a mask, [active]; None
        for all.

        Fresh ones stay whatever it says.
        """
        return None

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        """Return the figures by which ``select`` chose, for explanations; the figures that
        ``refine`` asks for are noted anyway."""
        return ()

    @classmethod
    def usage(cls) -> str:
        """Show how users write it, such as ``legolink-<tokens, 1 to 4096>``."""
        own = declared(cls).items()
        return cls.family + "".join(parameter.usage(name) for name, parameter in own)

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Describe the family as JSON: name, usage, what it does and its parameters, each with its
        meaning, its range or words, and its default (None: required)."""
        return {
            "name": cls.family,
            "usage": cls.usage(),
            "description": " ".join((cls.__doc__ or "").replace("``", "`").split()),
            "parameters": [
                {"name": name, "meaning": parameter.meaning}
                | parameter.describe()
                | {"default": parameter.default}
                for name, parameter in declared(cls).items()
            ],
        }

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Make a policy for each choice of its words, with default numbers, or numbers from the
        middle of their ranges."""
        own = declared(cls)
        return tuple(
            cls(**dict(zip(own, values, strict=True)))
            for values in product(*(parameter.examples for parameter in own.values()))
        )

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Make the policy with the parameters that stand after the family's name and a hyphen, such
        as "15-onestep"; None without a hyphen.

        Raises PolicyError for words that are not parameters, or repeated ones, for required ones
        that are missing, and for values out of range.
        """
        values: dict[str, Any] = {}
        own = declared(cls)
        for word in [] if text is None else text.split("-"):
            for name, parameter in own.items():
                if name not in values and (value := parameter.read(word)) is not None:
                    values[name] = value
                    break
            else:
                raise PolicyError(
                    f"Policy {cls.family!r} does not take {word!r} in '{cls.family}-{text}'. It is"
                    f" written {cls.usage()}.",
                    param="link.policy",
                )
        for name, parameter in own.items():
            if name not in values and parameter.default is None:
                raise PolicyError(
                    f"Policy {cls.family!r} needs {name} after a hyphen, {parameter.allowed}. "
                    f"It is written {cls.usage()}.",
                    param="link.policy",
                )
        return cls(**values)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"


SIGN = "+"
"""Stands between the names of policies that are joined."""


class Union(Policy):
    """Recompute the tokens that any of its parts selects and keeps; each part drops only tokens
    that it selected itself."""

    members: tuple[Policy, ...]

    family = SIGN

    def __post_init__(self) -> None:
        if len(self.members) < 2 or len({member.positioned for member in self.members}) > 1:
            raise PolicyError(
                f"Policy {self.name!r}: only two or more policies that place keys alike can be"
                " joined.",
                param="link.policy",
            )

    @cached_property
    def name(self) -> str:
        return SIGN.join(member.name for member in self.members)

    @cached_property
    def needs(self) -> Needs:
        return reduce(or_, (member.needs for member in self.members))

    @cached_property
    def positioned(self) -> bool:
        return self.members[0].positioned

    @cached_property
    def exact(self) -> bool:
        return any(member.exact for member in self.members)

    @cached_property
    def reach(self) -> int | None:
        reaches = [member.reach for member in self.members]
        known = [reach for reach in reaches if reach is not None]
        return max(known) if len(known) == len(reaches) else None

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.members

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        return reduce(
            lambda arranged, member: member.arrange(arranged, library), self.members, prompt
        )

    def settle(self, forecast: Forecast) -> Policy:
        return joined(member.settle(forecast) for member in self.members)

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for member in self.members:
            selected |= member.select(prompt, evidence)
        return selected

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        return tuple(score for member in self.members for score in member.explain(prompt, evidence))


def joined(policies: Iterable[Policy]) -> Policy:
    """Join the policies, each taken once; a single one is returned as it is."""
    members = tuple(dict.fromkeys(policies))
    return members[0] if len(members) == 1 else Union(members)
