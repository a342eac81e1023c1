"""A fleet on a Ray cluster of two nodes: the one with the head is lost for a while, and comes
back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest
from tests.redis_server import RedisServer, free_port
from tests.waiting import PATIENCE, wait_until

from fleet_tests.ray_serve.fleets import (
    CHAT,
    COMMAND,
    START_SECONDS,
    RunningFleet,
    asked,
    kill_all,
)

pytestmark = pytest.mark.whole

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
"""Addresses of two nodes on one machine; for 127.0.0.1, Ray would take the one that others see."""

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class Cluster:
    """A head without work, which keeps what it knows in Redis, and another node with the fleet."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.address = f"{HEAD}:{free_port()}"
        self._folder = folder
        self._known = {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}",
            "RAY_external_storage_namespace": "fleet",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start_head()
        patient = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        joining = (f"--address={self.address}", "--num-cpus=2")
        self.other = self._start(OTHER, *joining, environment=patient)

    def start_head(self) -> None:
        """As on a machine of its own, where nothing tells of a cluster that others are part of."""
        (self._folder / "ray_current_cluster").unlink(missing_ok=True)
        port = self.address.partition(":")[2]
        self._head = self._start(
            HEAD,
            *("--head", "--num-cpus=0", f"--port={port}", f"--temp-dir={self._folder}"),
            *("--include-dashboard=false", f"--ray-client-server-port={free_port()}"),
            environment=self._known,
        )
        wait_until(self._head_listens, START_SECONDS)

    def lose_head(self) -> None:
        kill_all(self._head)
        wait_until(lambda: not self._head_listens())

    def close(self) -> None:
        for each in self._processes:
            kill_all(each)

    def _start(
        self, node: str, *options: str, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        limits = (f"--node-ip-address={node}", f"--object-store-memory={80 << 20}")
        with (self._folder / f"{node}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *limits, *options],
                env=os.environ | ENVIRONMENT | environment,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def _head_listens(self) -> bool:
        host, port = self.address.split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), PATIENCE):
            return True
        return False


@pytest.fixture
def cluster(redis_server: RedisServer) -> Iterator[Cluster]:
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # a short path
        made = Cluster(Path(folder), redis_server)
        try:
            yield made
        finally:
            made.close()


def test_a_fleet_goes_on_without_ray_s_head_and_heals_when_it_is_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    port = free_port()
    options = ("--replicas", "2", "--ingresses", "1", "--cpus", "0.5", "--threads", "1")
    sizes = ("--host-memory", "100MiB", "--dtype", "float32", "--state-dir", str(tmp_path))
    deployed = subprocess.run(
        [*COMMAND, "fleet", "--address", cluster.address, "--port", str(port), *options, *sizes],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert deployed.returncode == 0, deployed.stderr
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        fleet = RunningFleet(cluster.other, url, http)
        wait_until(lambda: len(fleet.ready()) == 2, START_SECONDS)
        before = fleet.cache("Tom Reyes lives in Oslo. He works as a pilot.\n\n")
        cluster.lose_head()
        ids = [*before, *fleet.cache("Mira Holt lives in Varna.\n\n")]
        for _ in range(5):
            assert http.post(CHAT, json=asked(*ids)).status_code == 200
        lost = fleet.replicas()[0]
        psutil.Process(lost["pid"]).kill()
        for _ in range(5):
            assert http.post(CHAT, json=asked(*ids)).status_code == 200
        wait_until(lambda: lost["address"] not in fleet.ready())
        cluster.start_head()
        wait_until(lambda: len(fleet.ready()) == 2, START_SECONDS)
        for each in fleet.ready():
            answer = httpx.post(f"{each}{CHAT}", json=asked(*ids), timeout=PATIENCE)
            assert answer.json()["choices"][0]["message"]["content"] == "Oslo"
