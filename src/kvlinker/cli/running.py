"""The servers that run on a state directory: each writes a file there, by which commands on this
machine find it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.gguf_files import from_anywhere
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from kvlinker.doors.client import Client

FOLDER = "servers"
"""The folder of the files, in the state directory."""

DECISIVE = (
    *("model", "engine", "dtype", "weights", "chat_template", "system_prompt", "max_model_len"),
    *("generation_context", "embedding_model", "disk_codec"),
)
"""The settings that change what a command computes or stores: where a caller gives one of them, a
server with another value does not do the work."""

START_TOLERANCE_SECONDS = 2.0
"""The most by which two readings of a process's start differ: it is counted in ticks since the
machine's start, whose time the system adjusts with its clock."""

PROBE = httpx.Timeout(10.0, connect=1.0)
"""The longest wait for a server to say that it can work, before a command works without it."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Describes a server of this machine."""

    pid: int
    started: float
    """When its process was started, in Unix seconds."""

    ready: float
    """When it began to serve, in Unix seconds."""

    url: str
    model: str
    """The model's name in the API."""

    keyed: bool
    """True if it asks for an API key."""

    settings: dict[str, str]
    """The settings that ``DECISIVE`` names."""

    def fits(self, settings: Settings, api_key: str | None) -> bool:
        """Return whether the server computes what a command with these settings and this key would:
        all that the caller gave is as here, and each has a key or neither."""
        given = settings.model_fields_set & self.settings.keys()
        wanted = _decisive(settings)
        return self.keyed == (api_key is not None) and all(
            self.settings[name] == wanted[name] for name in given
        )

    def process(self) -> psutil.Process | None:
        """Return the server's process; None if it has ended."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if (
                abs(process.create_time() - self.started) <= START_TOLERANCE_SECONDS
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                return process
        return None


@contextmanager
def announced(settings: Settings, *, url: str, model: str) -> Iterator[None]:
    """Announce this process as a server at ``url`` to commands, until the block ends. Where the
    file cannot be written, commands do not find it."""
    process = psutil.Process()
    server = RunningServer(
        pid=process.pid,
        started=process.create_time(),
        ready=time.time(),
        url=url,
        model=model,
        keyed=bool(settings.accepted_keys),
        settings=_decisive(settings),
    )
    place = _file_of(settings.state_dir, process.pid)
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = place.with_suffix(".new")
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(server), file)
        written.replace(place)
    try:
        yield
    finally:
        with suppress(OSError):
            place.unlink(missing_ok=True)


def running_servers(state_dir: Path) -> list[RunningServer]:
    """Return the servers of this machine that run on a state directory, the latest first. Files of
    processes that have ended, as by a kill, are passed over."""
    found = []
    for place in (state_dir / FOLDER).glob(_file_of(state_dir, "*").name):
        with suppress(OSError, ValueError, TypeError):
            server = RunningServer(**json.loads(place.read_text(encoding="utf-8")))
            if server.process() is not None:
                found.append(server)
    return sorted(found, key=lambda server: server.ready, reverse=True)


@contextmanager
def joined(
    settings: Settings, api_key: str | None
) -> Iterator[tuple[RunningServer, Client] | None]:
    """Open the server that runs on the settings' state directory, computes what they ask for, and
    answers; None if there is none."""
    for server in running_servers(settings.state_dir):
        if not server.fits(settings, api_key):
            continue
        from kvlinker.doors.client import Client

        try:
            with Client(server.url, api_key, timeout=PROBE) as probe:
                probe.server_status()
        except KVLinkerError:
            continue
        with Client(server.url, api_key) as client:
            yield server, client
        return
    yield None


def _file_of(state_dir: Path, pid: int | str) -> Path:
    """Return the place of a server's file. Machines and containers that share a state directory
    have names of their own, and processes that others do not see."""
    return state_dir / FOLDER / f"{socket.gethostname()}.{pid}.json"


def _decisive(settings: Settings) -> dict[str, str]:
    told = {name: str(getattr(settings, name)) for name in DECISIVE}
    return told | {"model": from_anywhere(settings.model)}
