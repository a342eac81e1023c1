"""The interface by which long-running work reports its progress."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Takes news of work that is under way, to show them to a user."""

    def __call__(self, what: str, done: int = 0, total: int | None = None, /) -> None:
        """Take ``what`` is being done, and, where that can be counted, how much of the ``total`` is
        done."""


def silent(_what: str, _done: int = 0, _total: int | None = None, /) -> None:
    """Show nothing. It is the ``Progress`` of callers without a display."""
