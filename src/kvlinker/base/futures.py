"""Joins futures without a thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

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
        _settle(joined, lambda: finish(tuple(map(Future.result, waited))))
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


def follow_up(first: Future[T], following: Callable[[T], Future[R]]) -> Future[R]:
    """Return a future of the result of ``following(first.result())``, or of the failure of either.
    ``following`` runs in the thread that completes ``first``, or here if it is done."""
    joined: Future[R] = Future()

    def follow(done: Future[T]) -> None:
        try:
            second = following(done.result())
        except BaseException as error:
            joined.set_exception(error)
        else:
            second.add_done_callback(lambda done: _settle(joined, done.result))

    first.add_done_callback(follow)
    return joined


def fall_back(
    first: Future[T | None],
    otherwise: Callable[[T | None], Future[T]],
    accepts: Callable[[T], bool] = lambda _: True,
) -> Future[T]:
    """Return a future of the result of ``first`` or, if that is None or ``accepts`` is false for
    it, of ``otherwise(result)``. Both functions run where that of ``follow_up`` does."""

    def decide(value: T | None) -> Future[T]:
        return otherwise(value) if value is None or not accepts(value) else completed(value)

    return follow_up(first, decide)


def _settle(future: Future[R], work: Callable[[], R]) -> None:
    """Complete the future with the result of ``work``, or with what it raises."""
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
