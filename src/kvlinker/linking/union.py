"""The union of policies: a token is computed if any of them selects it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import PolicyError
from kvlinker.linking.evidence import Evidence, Forecast, Library
from kvlinker.linking.needs import Needs
from kvlinker.linking.policy import Policy
from kvlinker.linking.selection import Score
from kvlinker.prompting.segments import Prompt

SIGN = "+"


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

    @property
    def name(self) -> str:
        return SIGN.join(member.name for member in self.members)

    @property
    def needs(self) -> Needs:
        return reduce(or_, (member.needs for member in self.members))

    @property
    def positioned(self) -> bool:
        return self.members[0].positioned

    @property
    def exact(self) -> bool:
        return any(member.exact for member in self.members)

    @property
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
