"""A fleet whose replicas follow the load, from one to three and back, and its end: no request is
lost, and no process is left."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.waiting import PATIENCE, wait_until

from fleet_tests.ray_serve.fleets import (
    CHAT,
    START_SECONDS,
    RunningFleet,
    asked,
    started,
)

pytestmark = pytest.mark.whole

OPTIONS = (
    *("--min-replicas", "1", "--max-replicas", "3", "--target-requests", "2"),
    *("--upscale-delay", "1", "--downscale-delay", "2", "--ingresses", "1"),
    *("--cpus", "1", "--host-memory", "100MiB", "--dtype", "float32"),
)


class Clients:
    """Clients that ask for streams, one after the other, each time something else, and note how
    each of them ended."""

    def __init__(self, url: str) -> None:
        self.ends: Counter[str] = Counter()
        self.replicas: set[str] = set()
        self._url = url
        self._enough = threading.Event()
        self._numbers = itertools.count()

    @contextmanager
    def asking(self, number: int) -> Iterator[None]:
        with ThreadPoolExecutor(number) as pool:
            running: list[Future[None]] = [pool.submit(self._ask) for _ in range(number)]
            try:
                yield
            finally:
                self._enough.set()
                for each in running:
                    each.result()
                self._enough.clear()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as http:
            while not self._enough.is_set():
                turn = {"role": "user", "content": f"{next(self._numbers)}: where is Oslo?"}
                body = asked(stream=True, max_tokens=60, ignore_eos=True, messages=[turn])
                with http.stream("POST", CHAT, json=body) as stream:
                    lines = [line for line in stream.iter_lines() if line]
                ended = lines[-1] if not any('"error"' in line for line in lines) else lines[-2]
                self.ends[f"{stream.status_code} {ended}"] += 1
                self.replicas.add(stream.headers.get("x-kvlinker-replica", "none"))


def test_from_one_to_three_and_back_without_losing_a_request(tmp_path: Path) -> None:
    with started(tmp_path, *OPTIONS) as fleet:
        assert len(fleet.ready()) == 1
        clients = Clients(fleet.url)
        with clients.asking(12):
            wait_until(lambda: len(fleet.ready()) == 3, START_SECONDS)
            wait_until(lambda: len(clients.replicas) == 3, START_SECONDS)
        with clients.asking(1):
            wait_until(lambda: len(fleet.replicas()) == 1, START_SECONDS)
        assert set(clients.ends) == {"200 data: [DONE]"}
        ends_well(fleet)


def ends_well(fleet: RunningFleet) -> None:
    """Told to stop, it finishes a stream under way, and leaves no process."""
    processes = fleet.processes()
    body = asked(stream=True, max_tokens=150, ignore_eos=True)
    with fleet.http.stream("POST", CHAT, json=body) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        fleet.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert not [line for line in rest if '"error"' in line]
    assert fleet.process.wait(PATIENCE) == 0, "".join(fleet.log)
    _, left = psutil.wait_procs(processes, PATIENCE)
    assert not left
