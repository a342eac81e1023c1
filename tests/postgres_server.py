"""A real PostgreSQL server on a free port, that tests stop, kill and restart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import free_port
from tests.waiting import PATIENCE, wait_until

USER = "postgres"
"""Who runs the server where the tests are root's: it refuses root."""


class PostgresServer:
    """Has an empty database for each test."""

    def __init__(self) -> None:
        programs = _programs()
        if programs is None:
            pytest.skip(
                "PostgreSQL is not installed (a Debian package; 'make test' as root installs it)"
            )
        self._programs = programs
        self._user = USER if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        if self._user is not None:
            shutil.chown(self._folder, self._user, self._user)
        subprocess.run(
            [programs / "initdb", "-D", self._folder, "-A", "trust", "-U", USER, "--no-sync"],
            user=self._user,
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        self.port = free_port()
        self._databases = 0
        self.start()

    def start(self) -> None:
        """Start the server, which writes to the disk when it likes."""
        options = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
        self._process = subprocess.Popen(
            [
                *(str(self._programs / "postgres"), "-D", str(self._folder), "-p", str(self.port)),
                *(word for option in options for word in ("-c", option)),
            ],
            user=self._user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        wait_until(self._answers)

    def url(self, database: str = USER) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Make an empty database; returns its URL."""
        self._databases += 1
        name = f"test_{self._databases}"
        with closing(self.connect()) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def connect(self) -> Any:
        """Return the tests' own way in."""
        import psycopg

        return psycopg.connect(self.url(), autocommit=True)

    def kill(self) -> None:
        """End the server at once."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(PATIENCE)

    def hang(self) -> None:
        """Stop the server and the processes of its connections, which then answer nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(each, number)

    def remove(self) -> None:
        """End the server, and remove its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        import psycopg

        assert self._process.poll() is None, "PostgreSQL has not started"
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


def _programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, which Debian puts outside the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    program = shutil.which("initdb")
    return None if program is None else Path(program).parent
