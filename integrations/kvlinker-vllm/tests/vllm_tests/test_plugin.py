import logging
import multiprocessing
import signal
import time

import psutil
import pytest

from kvlinker_vllm import plugin
from kvlinker_vllm.plugin import FAILURE_FILE, FailureNote


def test_the_first_error_by_which_a_process_does_not_start_is_written_down(tmp_path):
    path = tmp_path / "failure"
    logger = logging.Logger("vllm")
    logger.addHandler(FailureNote(path))
    logger.error("no exception")
    for message in ("no room for\n  KV", "a worker did not start"):
        try:
            raise ValueError(message)
        except ValueError:
            logger.exception("It failed to start.")
    assert path.read_text() == "ValueError: no room for KV"


def test_errors_after_the_start_are_nobodys(tmp_path):
    note = FailureNote(tmp_path / "gone" / "failure")
    error = (ValueError, ValueError("late"), None)
    note.emit(logging.LogRecord("vllm", logging.ERROR, "", 0, "", None, error))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("starting", [False, True])
def test_vllms_engine_core_ends_with_a_server_that_is_killed(starting, tmp_path, monkeypatch):
    """Also while it starts: signals are only noted then, and there is no connector yet."""
    if starting:
        pytest.importorskip("vllm")
        monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "failure"))
    spawning = multiprocessing.get_context("spawn")
    told = spawning.Queue()
    server = spawning.Process(target=serve, args=(told, starting))
    server.start()
    core = psutil.Process(told.get(timeout=180))
    server.kill()
    server.join()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(core.pid) and core.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def serve(told, starting):
    core = multiprocessing.get_context("spawn").Process(
        target=compute, args=(told, starting), name="EngineCore"
    )
    core.start()
    core.join()


def compute(told, starting):
    if starting:
        signal.signal(signal.SIGTERM, lambda *_: None)
        plugin.register()
    else:
        plugin.end_with_parent()
    told.put(multiprocessing.current_process().pid)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # a signal that is only noted ends a sleep
        time.sleep(1)
