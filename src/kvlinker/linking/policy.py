"""The interface of a linking policy: which cached tokens of a prompt are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import PolicyError
from kvlinker.prompt.segments import Prompt

if TYPE_CHECKING:
    import torch


class LayerEvidence(Protocol):
    """What one layer's keys and values show about the tokens of a request that are computed."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """The tokens that are computed so far, ascending: [active]."""
        ...

    @property
    def cached(self) -> NDArray[np.bool_]:
        """True for active tokens that a chunk cache holds, false for fresh ones: [active]."""
        ...

    def key_deviation(self) -> torch.Tensor:
        """Squared L2 distance of new and placed key, over all heads: [active], fp32, 0 for fresh tokens."""
        ...

    def value_deviation(self) -> torch.Tensor:
        """Squared L2 distance of new and placed value, over all heads: [active], fp32, 0 for fresh tokens."""
        ...


class Policy(ABC):
    """Base of all policies: immutable, printable, and equal to another of the same name.

    ``select`` decides before the first layer. A policy that names ``refine_layers`` is asked again in each of them,
    when the layer's keys and values are known and before its attention. Cached tokens that it drops keep their placed
    KV in this layer and all that follow.
    """

    family: ClassVar[str]
    """Registered name, such as ``legolink``."""

    positioned: ClassVar[bool] = True
    """False: placed keys keep the positions that they were computed at (an ablation)."""

    refine_layers: frozenset[int] = frozenset()
    """Layers in which ``refine`` is asked."""

    @property
    def name(self) -> str:
        """Canonical name; parses back to an equal policy."""
        return self.family

    @abstractmethod
    def select(self, prompt: Prompt) -> NDArray[np.bool_]:
        """Positions to compute again: [length]. Fresh positions are computed whatever it says.

        Chunks whose span is ``exact`` need no repair.
        """

    def refine(self, layer: int, evidence: LayerEvidence) -> NDArray[np.bool_]:
        """Which active tokens stay from this layer's attention on: [active]. Fresh ones stay whatever it says."""
        raise NotImplementedError(f"{self.name} names refine_layers but does not refine")

    @classmethod
    def usage(cls) -> str:
        """How users write it, such as ``legolink-<tokens>``."""
        return cls.family

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        """The policy with the parameter that stands behind the family's name and a hyphen; None without a hyphen."""
        if parameter is not None:
            raise PolicyError(
                f"Policy {cls.family!r} takes no parameter, but got {parameter!r}.",
                param="link.policy",
            )
        return cls()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"


class CountPolicy(Policy):
    """A policy with one whole number as its parameter, such as ``legolink-16``."""

    unit: ClassVar[str]
    minimum: ClassVar[int] = 1
    maximum: ClassVar[int]

    def __init__(self, count: int) -> None:
        if not self.minimum <= count <= self.maximum:
            raise PolicyError(
                f"Policy {self.family}-{count}: the number of {self.unit} must be between {self.minimum} and "
                f"{self.maximum}.",
                param="link.policy",
            )
        self.count = count

    @property
    def name(self) -> str:
        return f"{self.family}-{self.count}"

    @classmethod
    def usage(cls) -> str:
        return f"{cls.family}-<{cls.unit}, {cls.minimum} to {cls.maximum}>"

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        if parameter is None or not (parameter.isascii() and parameter.isdigit()):
            raise PolicyError(
                f"Policy {cls.family!r} needs a whole number of {cls.unit} behind a hyphen, as in "
                f"{cls.family}-{cls.example()}; got {parameter!r}.",
                param="link.policy",
            )
        return cls(int(parameter[:9]))

    @classmethod
    def example(cls) -> int:
        return min(16, cls.maximum)
