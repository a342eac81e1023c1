"""What a fleet of embedded engines keeps to, one of vLLM's keeps to as well: the same tests, with
two replicas, each with a vLLM of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from tests.waiting import wait_until

from fleet_tests.ray_serve.fleets import CHAT, START_SECONDS, RunningFleet, asked, started
from fleet_tests.ray_serve.test_fleet import *  # noqa: F403
from fleet_tests.ray_serve.test_fleet import KEYS, TEXTS
from fleet_tests.ray_serve.test_scaling_fleet import ends_well
from kvlinker.settings import load_settings
from kvlinker_vllm.frontend.configuration import CPU_MEMORY_SHARE, shared_options
from vllm_tests.conftest import OPTIONS


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    state = tmp_path_factory.mktemp("state")
    options = ("--replicas", "2", "--dtype", "float32", "--engine", "vllm")
    with started(
        state,
        *options,
        *("--vllm-options", json.dumps(OPTIONS)),
        environment=KEYS,
        authorization="Bearer some",
    ) as fleet:
        yield fleet
        ends_well(fleet)


def engines(fleet: RunningFleet) -> list[psutil.Process]:
    """vLLM's own processes, in which the engines are: those that servers start. Not all get to name
    themselves."""
    found = []
    for server in fleet.named("ServeReplica"):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [
                each for each in server.children() if "resource_tracker" not in str(each.cmdline())
            ]
    return found


def test_engines_share_a_machine_without_gpus(fleet: RunningFleet) -> None:
    """Its memory, and its processors: none binds its threads to those that another is bound to."""
    settings = load_settings(engine="vllm")
    parts = [shared_options(settings, number)["gpu_memory_utilization"] for number in (1, 4)]
    assert parts == [CPU_MEMORY_SHARE, CPU_MEMORY_SHARE / 4]
    own = {"gpu_memory_utilization": 0.05}
    assert shared_options(load_settings(engine="vllm", vllm_options=own), 4) == own
    for engine in engines(fleet):
        for worker in engine.children():
            assert "OMP_PROC_BIND" not in worker.environ()


def test_a_replica_whose_engine_is_killed_is_replaced(fleet: RunningFleet) -> None:
    wait_until(lambda: len(fleet.ready()) == 2 and len(engines(fleet)) == 2, START_SECONDS)
    ids = fleet.cache(*TEXTS)
    killed, left = engines(fleet)
    with ThreadPoolExecutor(8) as clients:
        chats = [
            clients.submit(fleet.http.post, CHAT, json=asked(*ids, max_tokens=16, ignore_eos=True))
            for _ in range(24)
        ]
        next(each for each in chats if each.result().status_code == 200)
        killed.kill()
        assert {chat.result().status_code for chat in chats} == {200}
    wait_until(lambda: len(fleet.ready()) == 2 and len(engines(fleet)) == 2, START_SECONDS)
    assert left in engines(fleet)
