"""``kvlinker ps`` and ``kvlinker stop``: the servers that run on a state directory."""

from __future__ import annotations

import time
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from kvlinker.base.errors import KVLinkerError
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, output_console
from kvlinker.cli.options import settings_options
from kvlinker.cli.running import RunningServer, running_servers
from kvlinker.settings import Settings

ApiKey = Annotated[
    str | None, typer.Option(envvar="KVLINKER_API_KEY", help="Any key that the servers accept.")
]

PATIENCE = httpx.Timeout(5.0, connect=1.0)
"""The longest wait for a server to say what it does."""


@settings_options("state_dir")
def ps(settings: Settings, api_key: ApiKey = None) -> None:
    """List the servers that run on the state directory.

    Shows each one's address, model, since when it serves, and its requests.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("pid", justify="right")
    for title in ("address", "model", "since"):
        table.add_column(title, no_wrap=True)
    table.add_column("requests", overflow="fold")
    for server in running_servers(settings.state_dir):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(server.ready))
        table.add_row(
            str(server.pid), server.url, server.model, since, _requests_of(server, api_key)
        )
    if not table.row_count:
        typer.echo(f"No server runs on {settings.state_dir}.", err=True)
        return
    output_console().print(table)


def _requests_of(server: RunningServer, api_key: str | None) -> str:
    """Return how many requests run, wait and have ended, or why that is not known."""
    from kvlinker.doors.client import Client

    if server.keyed and api_key is None:
        return "asks for a key"
    try:
        with Client(server.url, api_key, timeout=PATIENCE) as client:
            counts = client.server_status()["requests"]
    except KVLinkerError as error:
        return error.code
    return ", ".join(f"{counts[state]} {state}" for state in ("running", "waiting", "finished"))


@settings_options("state_dir")
def stop(
    settings: Settings,
    pids: Annotated[
        list[int] | None,
        typer.Argument(help="Which servers, as ps lists them.", metavar="PID..."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all of them.")] = False,
) -> None:
    """Stop the server that runs on the state directory; of several, those that are named.

    Requests under way may finish within the server's drain_timeout. Returns when it has ended.
    """
    running = running_servers(settings.state_dir)
    chosen = [server for server in running if server.pid in (pids or ())]
    if strangers := set(pids or ()) - {server.pid for server in chosen}:
        names = ", ".join(map(str, sorted(strangers)))
        raise fail(f"no such server on {settings.state_dir}: {names}", FAILURE)
    if not running:
        raise fail(f"no server runs on {settings.state_dir}", FAILURE)
    if not pids and len(running) > 1 and not everything:
        names = ", ".join(f"{server.pid} ({server.model})" for server in running)
        raise fail(f"several servers run: name one of {names}, or --all", BAD_USAGE)
    processes = {}
    with failures():
        for server in chosen or running:
            if (process := server.process()) is not None:
                processes[server.pid] = process
                _ask_to_end(process)
    with Console(stderr=True).status("Waiting for requests under way"):
        psutil.wait_procs(processes.values())
    for pid in processes:
        typer.echo(f"{pid} stopped")


def _ask_to_end(process: psutil.Process) -> None:
    """Send a server the signal to stop. Raises KVLinkerError where it is another user's."""
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise KVLinkerError(
            f"The server {process.pid} is another user's: stop it as that user."
        ) from error
