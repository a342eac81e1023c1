"""Joining futures without a thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def gather(futures: Sequence[Future[T]], finish: Callable[[tuple[T, ...]], R]) -> Future[R]:
    """``finish`` of all results, in order, once every future is done; the first failure otherwise.

    ``finish`` runs in the thread that completes the last future.
    """
    joined: Future[R] = Future()
    waited = list(futures)
    if not waited:
        joined.set_result(finish(()))
        return joined
    lock = threading.Lock()
    missing = len(waited)

    def done(_: Future[T]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        try:
            joined.set_result(finish(tuple(future.result() for future in waited)))
        except BaseException as error:
            joined.set_exception(error)
        finally:
            waited.clear()  # a future that its own callback holds would keep its result alive

    for future in futures:
        future.add_done_callback(done)
    return joined
