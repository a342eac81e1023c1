"""A real redis-server on a free port, that tests stop, kill and restart."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.waiting import wait_until

PORTS = range(20_000, 30_000)
"""Those that the system gives to no connection by itself, so that a server that is killed finds its
own free again."""


MAXMEMORY = 1 << 30
"""The bytes that Redis may take, more than any test needs."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """Keeps nothing over a restart. ``client`` is the tests' own way in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port)
        self.start()

    def start(self, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip(
                "redis-server is not installed (a Debian package; 'make test' as root installs it)"
            )
        arguments = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--maxmemory",
            str(MAXMEMORY),
            "--maxmemory-policy",
            "allkeys-lru",
            "--dir",
            str(self._folder),
        ]
        self._process = subprocess.Popen([program, *arguments, *options], stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def hang(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.client.connection_pool.disconnect()
