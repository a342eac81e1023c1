"""The traffic that a soaked server gets, and its duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.load.traffic import KINDS, TrafficShape

FEWEST_SAMPLES = 6
"""Two for each third of the time: fewer say nothing about growth."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The traffic that a soaked server gets, and its duration."""

    seconds: float
    """How long the mixed traffic lasts."""
    every: float
    """Seconds between two samples of what the server takes."""
    policies: Sequence[str]
    """The linking policies, of which each conversation has one by chance."""
    users: int = 4
    """Conversations at the same time."""
    library: int = 24
    """Documents that can be asked about at the same time."""
    chunks: int = 3
    """Documents of a conversation's first prompt."""
    chunk_tokens: int = 128
    """The length of each document in tokens."""
    aborts: float = 0.1
    """The share of conversations whose client leaves at any moment."""
    uploads: float = 1.0
    """Documents per second that are replaced by new ones."""
    restart_every: float = 0.0
    """Seconds between two restarts of the server by SIGTERM; 0 for none."""
    growth: float = 0.03
    """The share by which memory, descriptors, threads and disk may grow from the middle third to
    the last."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seconds < FEWEST_SAMPLES * self.every:
            raise InvalidRequestError(
                f"{self.seconds:g} seconds have fewer than {FEWEST_SAMPLES} samples, one every"
                f" {self.every:g}: growth cannot be seen. Take longer, or look more often.",
                param="every",
            )

    @property
    def shapes(self) -> tuple[TrafficShape, ...]:
        """The kinds of conversations, all about the same documents."""
        return tuple(
            TrafficShape(
                kind=kind,
                library=self.library,
                chunks=self.chunks,
                chunk_tokens=self.chunk_tokens,
                output_tokens=(4, 32),
                turns=3,
                think_seconds=0.2,
            )
            for kind in KINDS
        )
