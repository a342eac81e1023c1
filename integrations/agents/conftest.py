"""One server with a real model for all agents: ``kvlinker serve`` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models" / "qwen2.5-coder-0.5b-instruct"
CLIENTS = ROOT / ".venv-agents"
PROGRAMS = (
    CLIENTS / "node_modules" / ".bin",
    CLIENTS / "bin",
    ROOT / ".venv-agents-aider" / "bin",
)
"""Where agents are installed, each group in an environment of its own."""

START_SECONDS = 600.0
"""The most seconds in which a busy machine starts a server: 20 on an idle one."""

AGENT_SECONDS = 1200.0
"""The most seconds that a session of an agent takes on a busy machine: two minutes on an idle
one."""

LEFT = (None, 499)
"""The statuses in the access log of a request whose client left."""


@dataclass
class Server:
    """A running server, and its log."""

    url: str
    log: Path
    _begin: int = field(default=0, init=False)

    def forget(self) -> None:
        """Have ``requests`` leave out what was asked until now."""
        self._begin = self.log.stat().st_size

    def requests(self) -> list[dict[str, Any]]:
        """Return the lines of the access log, but for those of other routes than the APIs'."""
        with self.log.open() as lines:
            lines.seek(self._begin)
            complete = [json.loads(line) for line in lines if line.endswith("}\n")]
        return [line for line in complete if (line.get("route") or "").startswith("/v1/")]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model answers greedily where a request has no temperature, so that each run
    is the same."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL.name} is not there: `make models` puts it together")
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    with log.open("w") as output:
        running = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("kvlinker")), "serve", "--port", "0"),
                *("--model", str(greedy_model(folder / "model"))),
                *("--served-model-name", "default", "--log-format", "json"),
                *("--state-dir", str(folder / "state")),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: address_in(log) is not None, seconds=START_SECONDS)
        url = address_in(log)
        assert url is not None
        yield Server(url, log)
    finally:
        running.terminate()
        running.wait()


def address_in(log: Path) -> str | None:
    """Return the address that a server's log tells, once it does."""
    found = re.search(r" at (http://[\d.:]+)\"", log.read_text())
    return found[1] if found else None


def greedy_model(folder: Path) -> Path:
    """Return a folder with the model's files, and a recommended temperature of 0."""
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    recommended = json.loads(config.read_text()) | {"do_sample": True, "temperature": 0.0}
    config.unlink()
    config.write_text(json.dumps(recommended))
    return folder


@dataclass(frozen=True)
class Agent:
    """Runs programs as a user does who has just installed them, in a repository of one file."""

    home: Path
    repository: Path

    def run(
        self,
        *command: str,
        stdin: str = "",
        until: Callable[[], bool] = lambda: False,
        **environment: str,
    ) -> str:
        """Return what a program prints until it ends, or until ``until`` is true. Fails if the
        program fails; skips the test if it is missing."""
        places = [place for place in PROGRAMS if (place / command[0]).exists()]
        if not places:
            pytest.skip(f"{command[0]} is not there: `make test-agents` installs it")
        paths = ":".join([*map(str, PROGRAMS), "/usr/bin", "/bin"])
        said, printed = self.home / "said", self.home / "printed"
        said.write_text(stdin)
        with said.open() as input_, printed.open("w") as output:
            running = subprocess.Popen(
                [str(places[0] / command[0]), *command[1:]],
                cwd=self.repository,
                env={"PATH": paths, "HOME": str(self.home)} | environment,
                stdin=input_,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: running.poll() is not None or until(), seconds=AGENT_SECONDS)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)
                running.wait()
            else:
                assert running.returncode == 0, printed.read_text()
        return printed.read_text()

    def configure(self, file: str, text: str) -> None:
        """Write a file of the user's configuration."""
        path = self.home / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    home, repository = tmp_path / "home", tmp_path / "repository"
    home.mkdir()
    repository.mkdir()
    (repository / "notes.txt").write_text("Zebra crossing.\n")
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    return Agent(home, repository)


@pytest.fixture(autouse=True)
def none_refused(server: Server) -> Iterator[None]:
    """Check that the server refuses no request of the test."""
    server.forget()
    yield
    statuses = {request["status"] for request in server.requests()}
    assert statuses <= {200, *LEFT}
