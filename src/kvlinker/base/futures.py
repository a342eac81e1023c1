"""Joins futures without a thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


def completed(value: T) -> Future[T]:
    """Return a future that has this result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def gather(futures: Sequence[Future[T]], finish: Callable[[tuple[T, ...]], R]) -> Future[R]:
    """Return a future of ``finish`` of all results, in order, once every future is done, or of the
    first failure.

    ``finish`` runs in the thread that completes the last future, or here if all are done.
    """
    joined: Future[R] = Future()
    waited = list(futures)
    lock = threading.Lock()
    missing = len(waited)

    def complete() -> None:
        try:
            joined.set_result(finish(tuple(map(Future.result, waited))))
        except BaseException as error:
            joined.set_exception(error)
        finally:
            waited.clear()  # a future that its own callback holds would keep its result alive

    def count(_: Future[T]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        complete()

    if all(map(Future.done, waited)):
        complete()
        return joined
    for future in futures:
        future.add_done_callback(count)
    return joined


def chain(first: Future[T], following: Callable[[T], Future[R]]) -> Future[R]:
    """Return a future of the result of ``following(first.result())``, or of the failure of either.
    ``following`` runs in the thread that completes ``first``, or here if it is done."""
    if first.done():
        try:
            return following(first.result())
        except Exception as error:
            failed: Future[R] = Future()
            failed.set_exception(error)
            return failed
    joined: Future[R] = Future()

    def pass_on(second: Future[R]) -> None:
        error = second.exception()
        if error is None:
            joined.set_result(second.result())
        else:
            joined.set_exception(error)

    first.add_done_callback(lambda done: chain(done, following).add_done_callback(pass_on))
    return joined


def fall_back(
    first: Future[T | None],
    otherwise: Callable[[T | None], Future[T]],
    accepts: Callable[[T], bool] = lambda _: True,
) -> Future[T]:
    """Return a future of the result of ``first`` or, if that is None or ``accepts`` is false for
    it, of ``otherwise(result)``. Both functions run where those of ``chain`` do."""

    if first.done() and first.exception() is None:
        value = first.result()
        if value is not None and accepts(value):
            return cast(Future[T], first)

    def decide(value: T | None) -> Future[T]:
        return otherwise(value) if value is None or not accepts(value) else completed(value)

    return chain(first, decide)
