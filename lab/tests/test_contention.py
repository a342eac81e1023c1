"""Measurements are disturbed as their rows say; their figures are not looked at."""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.quality.bench.harness.shapes import random_model
from kvlinker.settings import load_settings
from kvlinker_lab import contention_benchmark
from kvlinker_lab.contention import disturbances
from kvlinker_lab.contention.disturbances import (
    BUSY,
    compute_beside,
    compute_from_middle,
    control_group,
    create_chunks,
    limit_file,
    paused_processes,
)
from kvlinker_lab.contention.systems import LLAMA_CPP, Task, run_llm, seconds_per_token
from kvlinker_lab.contention.worker import measure
from kvlinker_lab.contention_benchmark import contention
from kvlinker_lab.peers.llama_files import llama_file
from tests.waiting import wait_until

TASK = Task("kvlinker", None, "tiny", (2, 20, 4), disturbances=("idle",))


@pytest.fixture
def busy():
    with paused_processes([BUSY]) as (process,):
        yield psutil.Process(process)


def _stopped(process):
    return process.status() == psutil.STATUS_STOPPED


def test_processes_compute_while_something_is_measured_beside_them(busy):
    wait_until(lambda: _stopped(busy))
    with compute_beside([busy.pid])(0):
        assert not _stopped(busy)
    wait_until(lambda: _stopped(busy))


def test_processes_arrive_in_the_middle(busy):
    with compute_from_middle([busy.pid])(0):
        wait_until(lambda: not _stopped(busy))
    wait_until(lambda: _stopped(busy))
    begin = time.monotonic()
    with compute_from_middle([busy.pid])(1000):
        assert _stopped(busy)
    assert time.monotonic() - begin < 500


def test_processes_end_with_what_is_measured():
    with paused_processes([BUSY, BUSY]) as processes:
        assert len(processes) == 2
    assert not any(map(psutil.pid_exists, processes))
    with (
        pytest.raises(InvalidRequestError, match="ended with status 3"),
        paused_processes([[sys.executable, "-c", "raise SystemExit(3)"]]),
    ):
        pass


def test_chunks_are_created_during_a_measurement_alone():
    creators: list[threading.Thread] = []
    second = threading.Event()

    def create():
        creators.append(threading.current_thread())
        if len(creators) == 2:
            second.set()

    with create_chunks(create)(0):
        assert second.wait(60)
    assert not creators[0].is_alive()


def test_a_control_group_limits_the_processes_that_join_it():
    reads = (
        "import sys; from pathlib import Path; from kvlinker.base.machine import ControlGroup;"
        " from kvlinker_lab.contention.disturbances import join; join(Path(sys.argv[1]));"
        " print(ControlGroup().processors())"
    )
    try:
        with control_group(0.5) as folder:
            told = subprocess.run(
                [sys.executable, "-c", reads, str(folder)], capture_output=True, text=True
            )
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert told.stdout == "0.5\n"
    assert not folder.exists()


def test_control_groups_of_both_versions_are_limited(tmp_path):
    file, limit = limit_file(1.5, tmp_path)
    assert (file.name, limit) == ("cpu.cfs_quota_us", "150000")
    assert file.parent.parent == tmp_path / "cpu"
    (tmp_path / "cgroup.subtree_control").write_text("memory cpu pids\n")
    file, limit = limit_file(1.5, tmp_path)
    assert (file.name, limit) == ("cpu.max", "150000 100000")
    assert file.parent.parent == tmp_path
    with (
        pytest.raises(InvalidRequestError, match="no control group"),
        control_group(1.5, tmp_path / "nowhere"),
    ):
        pass


def test_all_is_measured_beside_everything(busy, monkeypatch):
    monkeypatch.setattr(disturbances, "SETTLING", 0)
    names = ("idle", "busy", "arriving", "another", "creating")
    task = replace(TASK, disturbances=names, busy=(busy.pid,), another=(busy.pid,))
    measured = measure(task)
    assert tuple(measured) == names
    for times in measured.values():
        assert list(times) == ["full", "naive", "legolink-16", "token"]
        assert min(times.values()) > 0


def test_llama_cpp_is_measured_on_its_own_file(tmp_path, busy):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    loaded = random_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    loaded.model.save_pretrained(tmp_path / "model")
    file = llama_file(tmp_path / "model", tmp_path, None)
    task = replace(TASK, system=LLAMA_CPP, model=str(file), disturbances=("idle", "busy"))
    measured = measure(replace(task, busy=(busy.pid,)))
    assert [list(times) for times in measured.values()] == [["full", "naive", "token"]] * 2


def test_kvlinkers_own_engine_needs_no_package_for_vllm(monkeypatch):
    for module in ("kvlinker_vllm", "kvlinker_vllm.ttft_benchmark"):
        monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    with run_llm(TASK) as (llm, prompt):
        assert len(prompt.chunks) == TASK.workload[0]
        assert seconds_per_token(llm.engine, prompt, "naive") > 0


@pytest.fixture
def asked(monkeypatch):
    """What processes are asked for: each answers its place in the order, in all measurements."""
    asked: list[tuple[Task, str]] = []

    def run(case, **beside):
        task = replace(case.task, **beside)
        asked.append((task, case.waiting))
        return {
            name: {"full": float(len(asked)), "token": 2.0 * len(asked)}
            for name in task.disturbances
        }

    monkeypatch.setattr(contention_benchmark._Case, "run", run)
    monkeypatch.setattr(
        contention_benchmark, "is_installed", lambda kind, _: kind.name == "llama.cpp"
    )
    return asked


def test_rows_are_beside_the_systems_idle_one(asked, tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    report = contention(
        Setup(load_settings(), "tiny"),
        beside="busy,creating,quota",
        gguf=file,
        waiting="endless,30",
    )
    quota = [case for case in asked if case[0].group is not None]
    assert [(task.system, task.disturbances, waiting) for task, waiting in asked] == [
        (system, names, waiting)
        for system, first, waiting in (
            ("kvlinker", ("idle", "busy", "creating"), "endless"),
            ("kvlinker", ("idle", "busy", "creating"), "30"),
            ("llama.cpp", ("idle", "busy"), "endless"),
        )
        for names in (first, ("quota",))[: 2 if quota else 1]
    ]
    ratios = {
        (row["system"], row["waiting"], row["beside"]): row["token_ratio"] for row in report.rows
    }
    assert ratios["kvlinker", "endless", "busy"] == ratios["llama.cpp", "endless", "busy"] == 1
    assert ratios["kvlinker", "30", "idle"] == (3 if quota else 2)
    assert asked[-1][0].model == str(file)
    assert [warning.partition(" is")[0] for warning in report.warnings] == (
        ["kvlinker-vllm"] + ([] if quota else ["quota"])
    )


def test_what_is_missing_is_told(asked):
    setup = Setup(load_settings(), "tiny")
    report = contention(setup, beside="")
    assert [row["beside"] for row in report.rows] == ["idle"]
    assert "--gguf" in report.warnings[-1]
    with pytest.raises(InvalidRequestError, match="'bussy'; known are idle, busy"):
        contention(setup, beside="bussy")
