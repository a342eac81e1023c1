"""The interface by which an engine has other machines compute chunks that it lacks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol


class Elsewhere(Protocol):
    """Lets other engines compute chunks, into a tier that this engine's store shares."""

    def ask(self, key: str, tokens: int, seconds: float | None) -> Future[bool] | None:
        """Ask for the KV of the chunk ``key`` of ``tokens`` tokens, which takes about ``seconds``
        to compute here (None: not measured). Returns a future of whether it is there now, which is
        done in a limited time and never fails; None if asking does not pay."""
        ...

    def close(self) -> None:
        """Ask no more. Idempotent."""
        ...
