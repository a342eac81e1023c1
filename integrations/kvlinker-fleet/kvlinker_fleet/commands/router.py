"""``kvlinker router``: one address for several servers."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from kvlinker.cli.console import BAD_USAGE, fail, failures
from kvlinker.cli.options import settings_options
from kvlinker.doors.http.edge.address import bind, check_address, url_of
from kvlinker.settings import Settings
from kvlinker.settings.settings import names_host

_SETTINGS = (
    *("host", "port", "api_keys", "admin_keys", "allowed_hosts", "cors_origins"),
    *("request_timeout", "drain_timeout", "log_level", "log_format"),
)


@settings_options(*_SETTINGS)
def router(
    settings: Settings,
    backend: Annotated[
        list[str],
        typer.Option(
            help="The address of a kvlinker server, such as http://10.0.0.5:8000; give it several"
            " times."
        ),
    ],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVLINKER_API_KEY",
            help="An admin's key of the servers, to read what they have in memory; the first of"
            " --admin-keys by default.",
        ),
    ] = None,
    kv_events: Annotated[
        list[str] | None,
        typer.Option(
            help="Where a plain vLLM server publishes what it keeps, such as"
            " http://10.0.0.5:8000=tcp://10.0.0.5:5557; give it for each of them."
        ),
    ] = None,
) -> None:
    """Send each request to the server that has its chunks in memory, and is not too busy.

    The servers should share a catalog and a tier for chunks (catalog_url, redis_url). With
    api_keys, the router refuses unknown keys itself; the servers check them in any case.
    """
    for url in backend:
        if "@" in url:
            raise fail("--backend takes no user and password: give --api-key", BAD_USAGE)
        if not _is_address(url, "http", "https"):
            raise fail(f"--backend {url} is no address: write http://HOST:PORT", BAD_USAGE)
    urls = [url.rstrip("/") for url in backend]
    if len({urlsplit(url).netloc for url in urls}) < len(urls):
        raise fail("each --backend may be given once", BAD_USAGE)
    published = {}
    for each in kv_events or ():
        url, _, endpoint = each.rpartition("=")
        followed = endpoint.startswith("ipc://") or (
            _is_address(endpoint, "tcp") and urlsplit(endpoint).port
        )
        if url.rstrip("/") not in urls or not followed:
            raise fail(f"--kv-events {each} is none: write BACKEND=tcp://HOST:PORT", BAD_USAGE)
        published[url.rstrip("/")] = endpoint
    with failures(BAD_USAGE):
        check_address(settings.host, settings.accepted_keys)
    with failures(), closing(bind(settings.host, settings.port)) as listener:
        from kvlinker.doors.http.edge.access_log import logging_to_stderr
        from kvlinker.doors.http.edge.connections import EngineServer, server_config
        from kvlinker.doors.http.edge.request_spans import provider_from_environment
        from kvlinker_fleet.app import create_router
        from kvlinker_fleet.backends import always

        app = create_router(
            always(urls),
            settings,
            api_key=api_key or next(iter(settings.admin_keys), None),
            tracer_provider=provider_from_environment(),
            kv_events=published,
        )
        listener.listen()
        console = Console(stderr=True, highlight=False, quiet=settings.log_format == "json")
        console.print(f"Routing to {len(urls)} servers at {url_of(listener)}")
        config = server_config(app, request_timeout=settings.request_timeout)
        with logging_to_stderr(settings.log_level, settings.log_format):
            EngineServer(config, listener, healthy=lambda: True, drain=app.state.drain).run()


def _is_address(url: str, *schemes: str) -> bool:
    """Return whether a URL has one of the schemes, a host, perhaps a port, and nothing else."""
    if not names_host(url, *schemes):
        return False
    parts = urlsplit(url)
    return not (parts.path.strip("/") + parts.query + parts.fragment) and url[-1] not in "?#"
