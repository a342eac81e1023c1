"""One thread of the process computes in parallel, and has the only pool of OpenMP's workers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvlinker.base import threads
from kvlinker.base.threads import (
    SPINS,
    SPINS_VARIABLE,
    WAITING_VARIABLE,
    compute_serially,
    in_own_thread,
    serially,
    set_threads,
)
from tests.waiting import wait_until

TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(
    not TASKS.is_dir(), reason="the system does not list a process's threads"
)

SERVE_A_REQUEST = """
import os, sys, threading
from kvlinker import LLM
with LLM(dtype="float32", state_dir=sys.argv[1], disk_space="1GiB") as llm:
    texts = ["The kettle stands in the kitchen. " * 20, "The dog sleeps on the mat. " * 20]
    caches = llm.generate_context_cache(texts)
    llm.completion([*caches, "Where is the kettle?"], policy="legolink-16", max_tokens=4)
    llm.store.flush()
    llm.completion([*caches, "Where is the dog?"], policy="cacheblend-15", max_tokens=4)
    print(len(os.listdir("/proc/self/task")) - threading.active_count())
"""


MEASURE = """
import os, sys, threading
from pathlib import Path
from kvlinker.quality.bench import ttft
from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.settings import load_settings
rows_of = ttft._rows
def counted(*args, **options):
    print(len(os.listdir("/proc/self/task")) - threading.active_count())
    return rows_of(*args, **options)
ttft._rows = counted
subject = Setup(load_settings(state_dir=Path(sys.argv[1])), shape="tiny").subject()
ttft.run_ttft(subject, [Workload(2, 300, 16)], ["full", "naive"], repeat=1)
"""


def native_threads(program: str, threads: int, folder: Path) -> int:
    """Count the threads that are not Python's, of a process that serves or measures requests with
    so many threads computing."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=os.environ
        | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        | {
            "MKL_DYNAMIC": "FALSE",
            "OPENBLAS_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.whole
@pytest.mark.parametrize("program", [SERVE_A_REQUEST, MEASURE], ids=["serving", "measuring"])
def test_the_engine_has_the_only_pool(program: str, tmp_path: Path) -> None:
    few, many = (native_threads(program, count, tmp_path / str(count)) for count in (2, 6))
    assert many - few == 4, "each further pool would add four more"


def tasks() -> set[int]:
    """The threads of this process."""
    return set(map(int, os.listdir(TASKS)))


def native_since(before: set[int]) -> set[int]:
    """Those that are not Python's, and were not there before."""
    return tasks() - before - {thread.native_id or 0 for thread in threading.enumerate()}


def compute() -> None:
    left = torch.ones(1500, 1500)
    (left @ left).bfloat16().float().mul_(2).sum()


def test_a_thread_that_computes_serially_makes_no_pool(two_threads: None) -> None:
    def in_thread() -> int:
        compute_serially()
        compute()
        return torch.get_num_threads()

    before = tasks()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(in_thread).result() == 1
        assert not native_since(before)


def test_a_pool_ends_with_its_own_thread(two_threads: None) -> None:
    before = tasks()
    seen: list[threading.Thread] = []
    pool: set[int] = set()

    @in_own_thread
    def compute_alone() -> str:
        seen.append(threading.current_thread())
        compute()
        pool.update(native_since(before))
        return "done"

    assert compute_alone() == "done"
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()
    assert len(pool) == 1
    wait_until(lambda: not pool & tasks())


def test_what_is_raised_in_its_own_thread_comes_to_the_caller() -> None:
    @in_own_thread
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        fail()


def test_a_thread_computes_serially_for_a_while() -> None:
    before = torch.get_num_threads()
    with serially(), ThreadPoolExecutor(1) as other:
        assert torch.get_num_threads() == 1
        assert other.submit(torch.get_num_threads).result() >= 1
    assert torch.get_num_threads() == before


WAIT_AS_COMMANDS_DO = """
from kvlinker.cli import app
app(["policies"], standalone_mode=False)
import torch
"""


@pytest.mark.parametrize(
    ("given", "turns"),
    [({}, str(SPINS)), ({SPINS_VARIABLE: "17"}, "17"), ({WAITING_VARIABLE: "passive"}, "0")],
)
def test_openmp_is_told_how_threads_of_commands_wait(given: dict[str, str], turns: str) -> None:
    """It tells what it has read when it is loaded."""
    named = {SPINS_VARIABLE, WAITING_VARIABLE}
    others = {name: value for name, value in os.environ.items() if name not in named}
    done = subprocess.run(
        [sys.executable, "-c", WAIT_AS_COMMANDS_DO],
        env=others | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{SPINS_VARIABLE} = '{turns}'" in done.stderr


@pytest.mark.parametrize(("load", "told"), [(0.0, 0), (1e3, 1)])
def test_a_program_on_a_busy_machine_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: float, told: int
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    for name in (SPINS_VARIABLE, WAITING_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what the test sets does not stay
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    set_threads(None)
    assert caplog.text.count(f"{SPINS_VARIABLE}={SPINS}") == told
    threads.bound_spinning()
    assert os.environ[SPINS_VARIABLE] == str(SPINS)
    set_threads(None)
    assert caplog.text.count(f"{SPINS_VARIABLE}={SPINS}") == told
