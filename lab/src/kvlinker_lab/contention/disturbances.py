"""Disturbs measurements: by other processes, by a limit of the processors' time, and by chunks that
the same engine creates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError

BUSY = (sys.executable, "-c", "print(flush=True)\nwhile True: pass")
"""A process that computes all the time."""

SETTLING = 0.1
"""Seconds that processes compute before a measurement begins beside them: some tens of the
scheduler's time slices."""

PERIOD = 100_000
"""The period of a limit of the processors' time, in microseconds: Linux's own choice."""

CONTROL_GROUPS = Path("/sys/fs/cgroup")

Disturbance = Callable[[float], AbstractContextManager[None]]
"""Disturbs a measurement, given the seconds that it takes undisturbed."""


@contextmanager
def disturb_nothing(seconds: float) -> Iterator[None]:
    """Disturb nothing."""
    yield


@contextmanager
def paused_processes(commands: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Start processes, and pause each as soon as it has written a line. Return their ids.

    Raises InvalidRequestError where a process ends instead.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            if not process.stdout.readline():
                raise InvalidRequestError(
                    f"A process to measure beside ended with status {process.wait()}."
                )
            process.send_signal(signal.SIGSTOP)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def compute_beside(processes: Sequence[int]) -> Disturbance:
    """Let paused processes compute during the whole measurement."""

    @contextmanager
    def disturb(seconds: float) -> Iterator[None]:
        with _pause_at_end(processes):
            _signal(processes, signal.SIGCONT)
            time.sleep(SETTLING)
            yield

    return disturb


def compute_from_middle(processes: Sequence[int]) -> Disturbance:
    """Let paused processes compute from the middle of the measurement on."""

    @contextmanager
    def disturb(seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds / 2, _signal, (processes, signal.SIGCONT))
        with _pause_at_end(processes):
            timer.start()
            try:
                yield
            finally:
                timer.cancel()
                timer.join()

    return disturb


def create_chunks(create_chunk: Callable[[], object]) -> Disturbance:
    """Create one chunk after another during the measurement; ``create_chunk`` returns when it has
    created one."""

    @contextmanager
    def disturb(seconds: float) -> Iterator[None]:
        ended = threading.Event()

        def create() -> None:
            while not ended.is_set():
                create_chunk()

        thread = threading.Thread(target=create)
        thread.start()
        try:
            time.sleep(SETTLING)
            yield
        finally:
            ended.set()
            thread.join()

    return disturb


@contextmanager
def control_group(processors: float, root: Path = CONTROL_GROUPS) -> Iterator[Path]:
    """Make a control group with the time of ``processors``, and remove it in the end. A process
    joins it by ``join``.

    Raises InvalidRequestError where this process may not make one.
    """
    file, limit = limit_file(processors, root)
    try:
        file.parent.mkdir()
    except OSError as error:
        raise InvalidRequestError(f"This process may make no control group: {error}.") from error
    try:
        file.write_text(limit)
        yield file.parent
    finally:
        file.parent.rmdir()


def limit_file(processors: float, root: Path) -> tuple[Path, str]:
    """Return the file that limits a control group of this process's, and what to write into it: of
    version 2 where that version limits the processors' time, else of version 1."""
    name, quota = f"kvlinker-lab-{os.getpid()}", round(processors * PERIOD)
    controllers = root / "cgroup.subtree_control"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return root / name / "cpu.max", f"{quota} {PERIOD}"
    return root / "cpu" / name / "cpu.cfs_quota_us", str(quota)


def join(group: Path) -> None:
    """Move this process, and the processes that it starts, into a control group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def _pause_at_end(processes: Sequence[int]) -> Iterator[None]:
    """Pause ``processes`` in the end."""
    try:
        yield
    finally:
        _signal(processes, signal.SIGSTOP)


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)
