"""Starts a server in the background, and waits until it serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from kvlinker.base.errors import KVLinkerError, ModelLoadError
from kvlinker.cli.running import FOLDER, RunningServer, running_servers
from kvlinker.doors.http.edge.address import AddressError, bind
from kvlinker.settings import Settings

POLL_SECONDS = 0.1
LINE_SECONDS = 5.0
"""The seconds between two lines of progress where there is no terminal."""

LAST_LINES = 8
"""The lines of the log of a server that did not start that are shown."""


def start_server(settings: Settings) -> RunningServer:
    """Start ``kvlinker serve`` with these settings, in the background, and return it when it
    serves. Its port is that of the settings, or a free one where that is taken.

    It runs on when this process ends. Raises ModelLoadError, with the end of its log, if it ends
    before it serves.
    """
    place = _log_of(settings)
    arguments = {
        "model": settings.model,
        "state-dir": str(settings.state_dir),
        "port": str(_free_port(settings)),
    }
    options = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvlinker", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return _ready(process, settings, place)
    except BaseException:
        process.terminate()
        raise


def _ready(process: subprocess.Popen[bytes], settings: Settings, log: Path) -> RunningServer:
    """Wait until the process serves, and show the last line that it has written meanwhile."""
    console = Console(stderr=True)
    written = time.monotonic()
    title = f"Starting {settings.model}"
    with console.status(Text(title)) as status:
        while process.poll() is None:
            for server in running_servers(settings.state_dir):
                if server.pid == process.pid:
                    return server
            line = next(reversed(_lines(log)), "")
            status.update(Text(line or title))
            if not console.is_terminal and time.monotonic() - written >= LINE_SECONDS:
                written = time.monotonic()
                typer.echo(f"kvlinker: {line or title}", err=True)
            time.sleep(POLL_SECONDS)
    said = "\n".join(_lines(log)[-LAST_LINES:])
    raise ModelLoadError(f"The server has not started; its log {log} ends with\n{said}")


def _lines(log: Path) -> list[str]:
    """Return what a log's lines show: of one that was written over, the last text."""
    with suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
        shown = (line.rstrip("\r").rpartition("\r")[2].strip() for line in text.split("\n"))
        return [line for line in shown if line]
    return []


def _log_of(settings: Settings) -> Path:
    """Return the place of the server's log, named by the model, in an existing folder. Raises
    KVLinkerError."""
    folder = settings.state_dir / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KVLinkerError(
            f"The state directory {settings.state_dir} cannot be used: {error}. Choose another."
        ) from error
    name = re.sub(r"[^\w.-]", "-", settings.served_name)
    return folder / f"{name}.log"


def _free_port(settings: Settings) -> int:
    """Return the settings' port, or 0, for a free one, where it is taken."""
    try:
        bind(settings.host, settings.port).close()
    except AddressError:
        return 0
    return settings.port
