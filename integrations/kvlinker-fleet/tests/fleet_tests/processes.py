"""Servers and routers in processes of their own, over one catalog and one Redis."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer, free_port
from tests.waiting import PATIENCE, wait_until

from fleet_tests.ray_serve.fleets import START_SECONDS

KVLINKER = str(Path(sys.executable).with_name("kvlinker"))


class Processes:
    """Servers of the model in the box, each with a state directory of its own."""

    def __init__(self, folder: Path, postgres: PostgresServer, redis: RedisServer) -> None:
        self._folder = folder
        self.catalog_url, self._redis = postgres.new_database(), redis.url
        self._stack = ExitStack()
        self._count = 0

    def start(
        self, *options: str, command: str = "serve", port: int | None = None
    ) -> tuple[httpx.Client, subprocess.Popen[bytes]]:
        """Start a server, and return its client once it answers, and its process."""
        self._count += 1
        port = port or free_port()
        shared: tuple[str, ...] = ()
        if command == "serve":
            shared = (
                *("--state-dir", str(self._folder / str(self._count))),
                *("--catalog-url", self.catalog_url, "--redis-url", self._redis, "--threads", "1"),
                *("--disk-space", "0", "--host-memory", "256MiB", "--kv-slots", "8192"),
            )
        process = subprocess.Popen(
            [KVLINKER, command, "--port", str(port), *shared, *options],
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / f"{self._count}.log").open("w"),
        )
        self._stack.callback(process.wait, PATIENCE)
        self._stack.callback(process.kill)
        client = self._stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        )

        def answers() -> bool:
            assert process.poll() is None, (self._folder / f"{self._count}.log").read_text()
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, START_SECONDS)
        return client, process

    def close(self) -> None:
        self._stack.close()


def url(server: httpx.Client) -> str:
    return str(server.base_url).rstrip("/")
