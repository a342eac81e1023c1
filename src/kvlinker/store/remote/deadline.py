"""Calls that may hang, given a limit: the blob tier waits no longer for its medium."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_MOST_CALLS = 32


class Deadline:
    """Runs calls in threads of their own, so that one that hangs holds up nobody, not even the process's end."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(_MOST_CALLS)

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """The function's result. Raises TimeoutError when there is none in time (the call goes on unattended, and
        takes one of a limited number of places until it ends), and what the function raises.
        """
        started = time.monotonic()
        if not self._places.acquire(timeout=seconds):
            raise TimeoutError
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
            finally:
                self._places.release()

        try:
            threading.Thread(target=run, name="kvlinker-remote", daemon=True).start()
        except BaseException:
            self._places.release()
            raise
        return result.result(timeout=max(0.0, started + seconds - time.monotonic()))
