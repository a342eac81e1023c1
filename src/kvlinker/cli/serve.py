"""``kvlinker serve``: one model over HTTP."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlinker.cli.console import BAD_USAGE, ENGINE_FAILED, fail, failures
from kvlinker.cli.options import settings_options
from kvlinker.doors.http.edge.address import bind, check_address, url_of
from kvlinker.engines.contract.model_place import check_model
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

LEAST_SECONDS = 60.0
"""The time that an engine has to serve, its start not counted, to be started again."""

logger = logging.getLogger(__name__)


@settings_options(*Settings.model_fields)
def serve(settings: Settings) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    with failures(BAD_USAGE):
        check_address(settings.host, settings.accepted_keys)
    with failures():
        check_model(settings)
    with failures(), closing(bind(settings.host, settings.port)) as listener:
        _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> None:
    console = Console(stderr=True, highlight=False, quiet=settings.log_format == "json")
    with console.status("Starting"):
        from kvlinker.doors.http.edge.access_log import logging_to_stderr
        from kvlinker.doors.http.edge.request_spans import provider_from_environment
    with logging_to_stderr(settings.log_level, settings.log_format):
        provider = provider_from_environment()
        while (served := _serve_until_failure(settings, listener, console, provider)) is not None:
            message = "The engine has failed; its messages are above."
            if settings.on_engine_failure == "exit":
                raise fail(
                    f"{message} Start the server again, or set on_engine_failure to restart.",
                    ENGINE_FAILED,
                )
            if served < LEAST_SECONDS:
                raise fail(
                    f"{message} It served for less than {LEAST_SECONDS:.0f} s: it stays so.",
                    ENGINE_FAILED,
                )
            logger.error("%s It is started again.", message)


def _serve_until_failure(
    settings: Settings, listener: socket.socket, console: Console, provider: TracerProvider | None
) -> float | None:
    """Start the engine and serve until a signal stops it (returns None), or until the engine fails
    (returns the seconds for which it has served).

    ``provider`` takes the traces.
    """
    from kvlinker.doors.http.edge.connections import EngineServer, server_config
    from kvlinker.doors.serving import builder_client, create_server
    from kvlinker.llm import LLM

    with console.status(f"Loading and checking {escape(settings.model)}"):
        llm = LLM.from_settings(settings, builders=builder_client(settings))

    app = create_server(llm, settings, provider)
    listener.listen()  # a client that reads the address and connects at once is not refused
    policy = llm.default_policy().name
    console.print(_summary(settings, llm.model_name, llm.max_model_len, policy, url_of(listener)))
    if settings.log_format == "json":
        logger.info("Serving %s with policy %s at %s", llm.model_name, policy, url_of(listener))
    config = server_config(app, request_timeout=settings.request_timeout)
    server = EngineServer(
        config, listener, healthy=lambda: llm.healthy, drain=app.state.served.drain
    )
    began = time.monotonic()
    server.run()
    return time.monotonic() - began if server.engine_failed else None


def _summary(settings: Settings, name: str, window: int, policy: str, address: str) -> Table:
    keys = len(settings.accepted_keys)
    table = Table.grid(padding=(0, 2))
    for title, value in (
        ("model", f"{name} ({window:,} tokens)"),
        *([("weights", settings.weights)] if settings.weights != "auto" else []),
        ("policy", policy),
        ("state", f"{settings.state_dir} ({settings.disk_space.human_readable()} disk)"),
        ("memory", f"{settings.host_memory.human_readable()} for chunk caches"),
        *(("shared", place) for place in _shared_places(settings)),
        ("access", f"{keys} API keys" if keys else "loopback only, no API keys"),
        ("address", f"{address} (OpenAI's API at {address}/v1)"),
    ):
        table.add_row(f"[dim]{title}[/dim]", escape(value))
    return table


def _shared_places(settings: Settings) -> list[str]:
    """Return the remote tiers' places and budgets, without credentials."""
    from kvlinker.store.redaction import place_of

    tiers = (
        (settings.redis_url, settings.redis_space),
        (settings.object_url, settings.object_space),
    )
    return [
        f"{place_of(url.get_secret_value())} ({space.human_readable()})"
        for url, space in tiers
        if url and space
    ]
