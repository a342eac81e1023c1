"""What streaming and plain answers need from the format of a route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvlinker.server.generation import Outcome
from kvlinker.types.answers import Delta, Finished

Choice = Mapping[str, Any]


class AnswerFormat(Protocol):
    """The shapes of one route; one instance serves one request."""

    def envelope(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A chunk of a stream with these choices."""
        ...

    def opening(self, index: int) -> Sequence[Choice]:
        """What a choice's stream begins with."""
        ...

    def delta(self, index: int, delta: Delta) -> Choice:
        """New output of a choice."""
        ...

    def closing(self, index: int, finished: Finished) -> Choice:
        """The end of a choice's stream."""
        ...

    def answer(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The whole answer, without usage."""
        ...
