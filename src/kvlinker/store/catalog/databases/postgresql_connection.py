"""Connections to PostgreSQL with a deadline for each statement. A server that hangs still
acknowledges what it gets, so that neither TCP nor a timeout of its own ends the waiting: only the
client can."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

READ_SECONDS = 4.0
"""The deadline of a read in seconds; chosen by hand. Reads take milliseconds."""

WRITE_SECONDS = 12.0
"""The deadline, in seconds, of a statement that writes or waits for earlier transactions; chosen by
hand, longer than ``LOCK_SECONDS``."""

R = TypeVar("R")


class SilentServerError(psycopg.OperationalError):
    """The server did not answer in time; the connection is closed."""


class PatientConnection(psycopg.Connection[Any]):
    """A connection whose statements end by a deadline."""

    _seconds = READ_SECONDS

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Set the deadline of each statement in the block to ``seconds``."""
        before, self._seconds = self._seconds, seconds
        try:
            yield
        finally:
            self._seconds = before

    def wait(self, gen: Generator[Any, Any, R], *options: Any, **named: Any) -> R:
        return super().wait(self._bounded(gen), *options, **named)

    def _bounded(self, work: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
        """Yield what ``work`` waits for, which is sent what became ready: nothing, several times a
        second."""
        deadline = time.monotonic() + self._seconds
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise SilentServerError(f"no answer in {self._seconds:g} seconds")
                wanted = work.send(ready)
        except StopIteration as end:
            result: R = end.value
            return result
