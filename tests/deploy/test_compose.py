"""The commands of ``deploy/compose.yaml``, as processes on this machine in the order that it gives:
each starts when what it depends on does, and stops before that."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tools.image import entry_point, environment

from tests.deploy.documents import HOME, documents_of
from tests.postgres_server import PostgresServer
from tests.programs import README_CLIENT, README_URL, output_of
from tests.redis_server import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.whole

VARIABLES = {"KVLINKER_API_KEYS": "none", "KVLINKER_ADMIN_KEYS": "admin", "POSTGRES_PASSWORD": "p"}
"""What the user has to set."""
START_SECONDS = 600.0
"""What the image's health check gives a server."""
SERVICES: dict[str, Any] = {
    name: service
    for name, service in documents_of("compose.yaml")[0]["services"].items()
    if "profiles" not in service
}
ORDER = tuple(
    TopologicalSorter(
        {name: service.get("depends_on", ()) for name, service in SERVICES.items()}
    ).static_order()
)


class Composition:
    """The services, as processes: the names of hosts are replaced by ports of the loopback."""

    def __init__(self, folder: Path, postgres: PostgresServer) -> None:
        self._folder = folder
        self.ports = {name: free_port() for name in SERVICES} | {"postgres": postgres.port}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def start(self, name: str) -> None:
        """Start a service, once those are healthy that it says have to be."""
        for other in SERVICES[name].get("depends_on", ()):
            if "healthcheck" in SERVICES[other]:
                wait_until(partial(self.is_healthy, other))
        if name != "postgres":  # a fixture runs it
            command, variables = self._of_redis() if name == "redis" else self._of_kvlinker(name)
            with (self._folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(command, env=variables, stderr=log)

    def is_healthy(self, name: str) -> bool:
        """Run the service's health check."""
        _, program, *arguments = SERVICES[name]["healthcheck"]["test"]
        here = [program, "-h", "127.0.0.1", "-p", str(self.ports[name]), *arguments]
        return subprocess.run(here, stdout=subprocess.DEVNULL).returncode == 0

    def _of_redis(self) -> tuple[list[str], Mapping[str, str]]:
        here = ["--bind", "127.0.0.1", "--port", str(self.ports["redis"])]
        here += ["--dir", str(self._folder)]
        return [*shlex.split(SERVICES["redis"]["command"]), *here], os.environ

    def _of_kvlinker(self, name: str) -> tuple[list[str], Mapping[str, str]]:
        service = SERVICES[name]
        program, *default = entry_point()
        arguments = [self._here(word) for word in service.get("command", default)]
        home = self._folder / name
        given = {
            variable: value.replace(HOME, str(home))
            for variable, value in environment().items()
            if variable.startswith("KVLINKER_")
        }
        given |= {variable: self._here(value) for variable, value in service["environment"].items()}
        given |= {"KVLINKER_HOST": "127.0.0.1", "KVLINKER_PORT": str(self.ports[name])}
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        return command, os.environ | given

    def _here(self, text: str) -> str:
        """Fill in the user's variables, and find the hosts here."""
        filled = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: VARIABLES[found[1]], text)
        hosts = "|".join(SERVICES)
        return re.sub(
            rf"\b({hosts}):\d+", lambda found: f"127.0.0.1:{self.ports[found[1]]}", filled
        )

    def answers(self, name: str) -> bool:
        assert self.processes[name].poll() is None, (self._folder / f"{name}.log").read_text()
        try:
            return httpx.get(f"{self.url(name)}/health").is_success
        except httpx.TransportError:
            return False

    def stop(self) -> dict[str, int]:
        """Stop each within the time that the file gives it, before those that it depends on; return
        their exit statuses."""
        found = {}
        for name in reversed(ORDER):
            if name in self.processes:
                process = self.processes.pop(name)
                process.terminate()
                grace = SERVICES[name].get("stop_grace_period", "10s")
                found[name] = process.wait(float(grace.removesuffix("s")))
        return found

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def composition(tmp_path: Path, postgres_server: PostgresServer) -> Iterator[Composition]:
    """All services, started; PostgreSQL has the user and the database that its image makes."""
    missing = [name for name in ("redis-server", "pg_isready") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    user = SERVICES["postgres"]["environment"]["POSTGRES_USER"]
    with postgres_server.connect() as connection:
        connection.execute(f"CREATE ROLE {user} LOGIN")
        connection.execute(f"CREATE DATABASE {user} OWNER {user}")
    made = Composition(tmp_path, postgres_server)
    try:
        for name in ORDER:
            made.start(name)
        yield made
    finally:
        made.kill()
        with postgres_server.connect() as connection:
            connection.execute(f"DROP DATABASE {user} WITH (FORCE)")
            connection.execute(f"DROP ROLE {user}")


def test_two_servers_answer_as_one_and_stop(composition: Composition) -> None:
    for name in ("first", "second", "router"):
        wait_until(partial(composition.answers, name), START_SECONDS)
    program, printed = README_CLIENT
    assert output_of(program.replace(README_URL, composition.url("router"))) == printed
    key = {"Authorization": f"Bearer {VARIABLES['KVLINKER_API_KEYS']}"}
    listed = [
        httpx.get(f"{composition.url(name)}/v1/context_caches", headers=key).json()["data"]
        for name in ("first", "second")
    ]
    assert [each["id"] for each in listed[0]] == [each["id"] for each in listed[1]]
    assert len(listed[0]) == 2
    assert composition.stop() == dict.fromkeys(("router", "first", "second", "redis"), 0)
