"""The engine's loop says how long steps took, inside of the model and outside. What it tells its
callers waits for a flush, and keeps its order."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kvlinker.engines.embedded.loop import Outbox
from tests.engines.embedded.fake_runner import Simulation, Timing


def test_steps_are_timed_inside_of_the_model_and_outside() -> None:
    timing = Timing()
    simulation = Simulation(100, timing=timing, max_step_tokens=32)
    simulation.add(10, 3)
    simulation.add(7, 3)
    simulation.run()
    times = list(simulation.loop.times)
    assert [time.requests for time in times] == [2, 2, 2]
    assert [time.tokens for time in times] == [17, 2, 2]
    assert [time.inside for time in times] == pytest.approx(timing.taken)
    # nothing but the model moves this clock on
    assert [time.outside for time in times] == pytest.approx([0, 0, 0], abs=1e-9)
    assert all(time.outside_cpu > 0 for time in times)
    assert times[0]._replace(inside=3.0, outside=1.0).share == 0.25


def test_what_callers_do_is_no_part_of_the_models_time() -> None:
    timing = Timing()
    simulation = Simulation(100, timing=timing, max_step_tokens=32)
    simulation.add(10, 3)
    box = simulation.loop.outbox

    def slow() -> None:
        timing.now += 5

    done = simulation.loop._turn
    for _ in range(2):
        box.own()
        box.put(slow)
        done()
    times = list(simulation.loop.times)
    assert [time.inside for time in times] == pytest.approx(timing.taken)
    assert [time.outside for time in times] == pytest.approx([5, 5])


def test_steps_that_fail_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(100, timing=Timing())
    simulation.add(10, 3)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(simulation.runner, "step", fails)
    simulation.loop._turn()
    assert not simulation.loop.times


def in_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_the_owners_calls_wait_and_come_in_order() -> None:
    box, told = Outbox(), list[int]()
    box.put(partial(told.append, 0))
    assert told == [0]
    box.own()
    for number in (1, 2):
        box.put(partial(told.append, number))
    assert told == [0]
    box.flush()
    assert told == [0, 1, 2]
    box.put(partial(told.append, 3))
    box.disown()
    box.put(partial(told.append, 4))
    assert told == [0, 1, 2, 3, 4]


def test_another_threads_call_comes_at_once_behind_what_was_put_off() -> None:
    box, told = Outbox(), list[int]()
    box.own()
    box.put(partial(told.append, 1))
    in_thread(lambda: box.put(partial(told.append, 2)))
    assert told == [1, 2]


def test_a_call_may_put_another() -> None:
    box, told = Outbox(), list[int]()
    box.own()

    def first() -> None:
        told.append(1)
        box.put(partial(told.append, 3))

    box.put(first)
    box.put(partial(told.append, 2))
    box.flush()
    assert told == [1, 2, 3]
