"""Runs a system in a process of its own. ``python -m kvlinker_lab.contention.worker measure TASK``
writes the measurements, and ``answer`` in place of ``measure`` answers requests all the time. A
task is JSON."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from kvlinker.quality.bench.harness.measurement import seconds_of
from kvlinker_lab.contention.disturbances import (
    Disturbance,
    compute_beside,
    compute_from_middle,
    create_chunks,
    disturb_nothing,
    join,
)
from kvlinker_lab.contention.systems import System, Task, run_llm, run_system, seconds_per_token

STREAMS = 2
"""Requests that are answered at once all the time: while one is prefilled, another decodes."""


def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return the medians of the measurements in milliseconds, by disturbance and name."""
    if task.group is not None:
        join(Path(task.group))
    with run_system(task) as system:
        usual = {name: _warm_up(measured) for name, measured in system.measurements.items()}
        known = _disturbances(task, system)
        order = [(disturbance, name) for disturbance in task.disturbances for name in usual]
        taken = defaultdict[tuple[str, str], list[float]](list)
        for _ in range(task.repeat):
            for disturbance, name in order:
                with known[disturbance](usual[name]):
                    taken[disturbance, name].append(system.measurements[name]())
            order.reverse()  # so that none always follows the same one
    return {
        disturbance: {name: 1e3 * median(taken[disturbance, name]) for name in usual}
        for disturbance in task.disturbances
    }


def _warm_up(measurement: Callable[[], float]) -> float:
    """Return the seconds that a measurement takes undisturbed, all that it does included."""
    measurement()
    return seconds_of(measurement)()


def _disturbances(task: Task, system: System) -> Mapping[str, Disturbance]:
    known = {
        "idle": disturb_nothing,
        "quota": disturb_nothing,  # but by the control group, which limits the process all the time
        "busy": compute_beside(task.busy),
        "arriving": compute_from_middle(task.busy),
        "another": compute_beside(task.another),
    }
    if system.create_chunk is not None:
        known["creating"] = create_chunks(system.create_chunk)
    return known


def answer(task: Task) -> None:
    """Prefill and decode all the time, once a line is written."""
    with run_llm(task) as (llm, prompt), ThreadPoolExecutor(STREAMS) as threads:
        seconds_per_token(llm.engine, prompt, "full")
        print("ready", flush=True)

        def stream() -> None:
            while True:
                seconds_per_token(llm.engine, prompt, "full")

        for future in [threads.submit(stream) for _ in range(STREAMS)]:
            future.result()


def main() -> None:
    """Read the task, and measure or answer."""
    do, text = sys.argv[1:]
    task = Task(**json.loads(text))
    if do == "answer":
        answer(task)
    else:
        print(json.dumps(measure(task)))


if __name__ == "__main__":
    main()
