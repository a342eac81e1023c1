"""The engine's loop says how long steps took, inside of the model and outside."""

from __future__ import annotations

import pytest

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
    box = simulation.loop._outbox

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
