"""What policies made of examples."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlinker.research.evaluation.deviation import Deviation
from kvlinker.types.answers import Usage


@dataclass(frozen=True, slots=True)
class _Result:
    """What all results have. ``agreement``: the share of the tokens looked at for which the most likely one is full's;
    ``kl``: their mean divergence from full, in nats."""

    example: str
    policy: str
    cached_tokens: int
    recomputed_tokens: int
    agreement: float
    kl: float
    deviation: Deviation | None = field(default=None, kw_only=True)

    @property
    def recomputed_fraction(self) -> float:
        """Tokens computed again over all that chunk caches held."""
        return Usage(self.cached_tokens, self.recomputed_tokens, fresh_tokens=0).recomputed_fraction


@dataclass(frozen=True, slots=True)
class Answered(_Result):
    """A question's answer; its first token is looked at."""

    text: str


@dataclass(frozen=True, slots=True)
class Scored(_Result):
    """How likely a continuation is: ``loss`` in nats per token. All tokens that count in it are looked at."""

    loss: float


Result = Answered | Scored
