"""The interface of a linking policy: which cached tokens of a prompt are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking import parameters
from kvlinker.linking.evidence import Evidence, Forecast, LayerEvidence, Library
from kvlinker.linking.selection import Score
from kvlinker.prompt.segments import Prompt


@dataclass_transform(
    frozen_default=True, field_specifiers=(parameters.number, parameters.percentage, parameters.choice)
)
class Policy(ABC):
    """Base of all policies. Subclasses become frozen dataclasses, their fields being the policy's parameters.

    A policy holds no state. It is asked up to four times: ``arrange`` picks the KV, ``settle`` how much to compute,
    ``select`` the tokens before the first layer, ``refine`` those that are still computed in every layer. Cached tokens
    that it does not select, or drops in a layer, keep their placed KV in this layer and all that follow.
    """

    family: ClassVar[str]
    """Registered name, such as ``legolink``."""

    positioned: ClassVar[bool] = True
    """False: placed keys keep the positions that they were computed at (an ablation)."""

    forecasts: ClassVar[bool] = False
    """``settle`` looks at what loading the chunks is expected to take."""

    uses_scores: ClassVar[bool] = False
    """``select`` looks at the scores of the chunks' creation."""

    uses_variants: ClassVar[bool] = False
    """``arrange`` picks among variants; those that a request missed are created when the engine has time."""

    probes: ClassVar[bool] = False
    """``select`` looks at the question's attention: the fresh tokens pass once over the placed KV before it."""

    refines: ClassVar[bool] = False
    """``refine`` is asked in every layer, or in ``refined_layer``."""

    refined_layer: ClassVar[int | None] = None
    """The only layer in which ``refine`` is asked; None: every one. With 1, a first pass over the first layer shows all
    that it looks at."""

    watches: ClassVar[bool] = False
    """``refine`` looks at the question's attention on the chunks in earlier layers."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, repr=False)(cls)

    def __post_init__(self) -> None:
        """Raises PolicyError for a parameter out of its range."""
        parameters.check(self.name, self)

    @property
    def name(self) -> str:
        """Canonical name; parses back to an equal policy."""
        return "-".join([self.family, *parameters.write(self)])

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies that this one is the union of; itself, if it is none."""
        return (self,)

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        """The same prompt from other KV: chunks replaced by variants, or in another order. As it is by default."""
        return prompt

    def settle(self, forecast: Forecast) -> Policy:
        """The policy that takes this one's place for a prompt of which that is expected. Itself by default."""
        return self

    @abstractmethod
    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        """Positions to compute again: [length]. Fresh positions are computed whatever it says.

        ``prompt.inexact`` are the positions that may need repair.
        """

    def refine(self, evidence: LayerEvidence) -> NDArray[np.bool_] | None:
        """Which active tokens stay from this layer's attention on: [active]; None for all.

        Fresh ones stay whatever it says.
        """
        return None

    def explain(self, prompt: Prompt, evidence: Evidence) -> tuple[Score, ...]:
        """The figures by which ``select`` chose, for people who want to know. What ``refine`` asks for is known."""
        return ()

    @classmethod
    def usage(cls) -> str:
        """How users write it, such as ``legolink-<tokens, 1 to 4096>``."""
        return parameters.usage(cls, cls.family)

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Name, usage, what it does and its parameters, as JSON."""
        return {
            "name": cls.family,
            "usage": cls.usage(),
            "description": " ".join((cls.__doc__ or "").replace("``", "`").split()),
            "parameters": parameters.describe(cls),
        }

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """The policy with the parameters that stand behind the family's name and a hyphen; None without a hyphen.

        Raises PolicyError for what is not a parameter, or out of its range.
        """
        return cls(**parameters.read(cls, cls.family, text))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"
