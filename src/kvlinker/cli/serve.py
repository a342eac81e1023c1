"""``kvlinker serve``: one model over HTTP."""

from __future__ import annotations

import logging
import socket
from contextlib import closing, suppress

from rich.console import Console
from rich.table import Table

from kvlinker.cli.console import BAD_USAGE, failures
from kvlinker.cli.options import settings_options
from kvlinker.config import Settings
from kvlinker.server.address import bind, check_address, url_of

logger = logging.getLogger(__name__)


@settings_options()
def serve(settings: Settings) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    with failures(BAD_USAGE):
        check_address(settings.host, settings.accepted_keys)
    with failures(), closing(bind(settings.host, settings.port)) as listener:
        _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> None:
    lines_only = settings.log_format == "json"
    console = Console(stderr=True, highlight=False, quiet=lines_only)
    with console.status("Starting"):
        import uvicorn

        from kvlinker.llm import LLM
        from kvlinker.server.access_log import logging_to_stderr
        from kvlinker.server.app import create_app
        from kvlinker.server.connections import server_config
    with console.status(f"Loading and checking {settings.model}"):
        llm = LLM.from_settings(settings)
    app = create_app(llm, settings)
    console.print(_summary(settings, llm.model_name, llm.max_model_len, url_of(listener)))
    config = server_config(app, request_timeout=settings.request_timeout)
    with logging_to_stderr(settings.log_level, settings.log_format), suppress(KeyboardInterrupt):
        if lines_only:
            logger.info("Serving %s with policy %s at %s", llm.model_name, settings.policy, url_of(listener))
        uvicorn.Server(config).run(sockets=[listener])


def _summary(settings: Settings, name: str, window: int, address: str) -> Table:
    keys = len(settings.accepted_keys)
    table = Table.grid(padding=(0, 2))
    for title, value in (
        ("model", f"{name} ({window:,} tokens)"),
        *([("weights", settings.weights)] if settings.weights != "auto" else []),
        ("policy", settings.policy),
        ("state", f"{settings.state_dir} ({settings.disk_space.human_readable()} disk)"),
        ("memory", f"{settings.host_memory.human_readable()} for chunk caches"),
        *(("shared", place) for place in _shared_places(settings)),
        ("access", f"{keys} API keys" if keys else "loopback only, no API keys"),
        ("address", f"{address} (OpenAI's API at {address}/v1)"),
    ):
        table.add_row(f"[dim]{title}[/dim]", value)
    return table


def _shared_places(settings: Settings) -> list[str]:
    """The remote tiers' places and budgets, without credentials."""
    from kvlinker.store.tiers.medium import place_of

    tiers = ((settings.redis_url, settings.redis_space), (settings.object_url, settings.object_space))
    return [f"{place_of(url.get_secret_value())} ({space.human_readable()})" for url, space in tiers if url and space]
