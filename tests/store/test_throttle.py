"""Background work rests while others compute, and only then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvlinker.store.throttle import SHARE, Rest, Throttle
from tests.clocks import ManualClock
from tests.waiting import PATIENCE

WORK = 0.01
FULL_REST = WORK * (1 / SHARE - 1)
"""Seconds that a piece of work is followed by while others compute."""

AGES = 1e6
"""Seconds of work behind which a rest does not end by itself."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def rest_behind(work: float, clock: ManualClock, rest: Rest) -> float:
    """Rest behind so many seconds of work; returns how long."""
    clock.advance(work)
    begin = time.monotonic()
    rest()
    return time.monotonic() - begin


def test_work_goes_on_at_once_while_nobody_computes(
    clock: ManualClock, worker: ThreadPoolExecutor
) -> None:
    worker.submit(rest_behind, AGES, clock, Throttle(clock).rests()).result(PATIENCE)


def test_work_takes_its_share_of_the_time_while_others_compute(
    clock: ManualClock, worker: ThreadPoolExecutor
) -> None:
    background = Throttle(clock)
    rest = background.rests()
    background.idle.clear()
    assert rest_behind(WORK, clock, rest) >= FULL_REST
    background.idle.set()
    worker.submit(rest_behind, AGES, clock, rest).result(PATIENCE)


def test_a_rest_ends_with_the_last_computation(
    clock: ManualClock, worker: ThreadPoolExecutor
) -> None:
    background = Throttle(clock)
    background.idle.clear()
    resting: Future[float] = worker.submit(rest_behind, AGES, clock, background.rests())
    assert not resting.done()
    background.idle.set()
    resting.result(PATIENCE)
