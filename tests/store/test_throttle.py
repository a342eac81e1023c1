"""Background work rests while others compute, and only then."""

from __future__ import annotations

import threading
import time

import pytest

from kvlinker.store import throttle as module
from kvlinker.store.throttle import Rest, Throttle

WORK = 0.05
FULL_REST = WORK * (1 / module.SHARE - 1)
"""Seconds that a piece of work is followed by while others compute."""
TIMEOUT = 10.0


def rested(rest: Rest) -> float:
    """Seconds of a rest behind a piece of work."""
    time.sleep(WORK)
    begin = time.monotonic()
    rest()
    return time.monotonic() - begin


def test_work_goes_on_at_once_while_nobody_computes() -> None:
    assert rested(Throttle().rests()) < FULL_REST / 2


def test_work_takes_its_share_of_the_time_while_others_compute() -> None:
    background = Throttle()
    rest = background.rests()
    with background.computing(), background.computing():
        assert rested(rest) >= FULL_REST
    assert rested(rest) < FULL_REST / 2


def test_a_rest_ends_with_the_last_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE", 1e-6)
    background = Throttle()
    first, second = background.computing(), background.computing()
    first.__enter__()
    second.__enter__()
    ended = threading.Event()

    def work() -> None:
        rest = background.rests()
        time.sleep(WORK)
        rest()
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    first.__exit__(None, None, None)
    assert not ended.wait(10 * WORK)
    second.__exit__(None, None, None)
    assert ended.wait(TIMEOUT)
    worker.join()
