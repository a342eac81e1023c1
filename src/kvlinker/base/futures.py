"""Joining futures without a thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def resolved(value: T) -> Future[T]:
    """Return a future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def gather(futures: Sequence[Future[T]], finish: Callable[[tuple[T, ...]], R]) -> Future[R]:
    """Return a future of ``finish`` of all results, in order, once every future is done, or of the
    first failure.

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


def then(found: Future[T], go_on: Callable[[T], Future[R]]) -> Future[R]:
    """Return a future of the result of ``go_on(found.result())``, or of the failure of either.
    ``go_on`` runs in the thread that completes ``found``."""
    joined: Future[R] = Future()

    def pass_on(other: Future[R]) -> None:
        error = other.exception()
        if error is None:
            joined.set_result(other.result())
        else:
            joined.set_exception(error)

    def begin(found: Future[T]) -> None:
        try:
            go_on(found.result()).add_done_callback(pass_on)
        except Exception as error:
            joined.set_exception(error)

    found.add_done_callback(begin)
    return joined


def or_else(
    found: Future[T | None],
    otherwise: Callable[[T | None], Future[T]],
    accepts: Callable[[T], bool] = lambda _: True,
) -> Future[T]:
    """Return a future of the result of ``found`` or, if that is None or ``accepts`` is false for
    it, of ``otherwise(result)``. Both functions run in the thread that completes ``found``."""

    def decide(value: T | None) -> Future[T]:
        return otherwise(value) if value is None or not accepts(value) else resolved(value)

    return then(found, decide)
