import multiprocessing
import time
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")

import vllm

from kvlinker.errors import KVLinkerError, UnsupportedModelError
from kvlinker.vllm import adapter


def test_the_installed_version_was_tested():
    adapter.require_tested_version()


def test_other_versions_are_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(KVLinkerError, match=r"0\.99\.1 .* 0\.32\.0 .*allow_untested"):
        adapter.require_tested_version()
    adapter.require_tested_version(allow_untested=True)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel_size is 2, .* tensor_parallel_size"),
        ("speculative_config", {"method": "ngram"}, "leave speculative_config out"),
        ("lora", True, "leave enable_lora out"),
    ],
)
def test_what_is_not_linked_is_refused_with_the_way_out(name, value, told):
    plain: dict[str, Any] = {"pipeline_parallel_size": 1, "speculative_config": None, "lora": None}
    adapter.require_linkable(**plain)
    with pytest.raises(UnsupportedModelError, match=told):
        adapter.require_linkable(**(plain | {name: value}))


def test_vllms_engine_core_ends_with_a_server_that_is_killed():
    spawning = multiprocessing.get_context("spawn")
    told = spawning.Queue()
    server = spawning.Process(target=serve, args=(told,))
    server.start()
    core = psutil.Process(told.get(timeout=60))
    server.kill()
    server.join()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(core.pid) and core.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def serve(told):
    core = multiprocessing.get_context("spawn").Process(target=compute, args=(told,), name="EngineCore")
    core.start()
    core.join()


def compute(told):
    adapter.end_with_parent()
    told.put(multiprocessing.current_process().pid)
    time.sleep(120)
