"""The router's application: its own routes, and the proxy for everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING

import httpx
from fastapi import FastAPI, Response

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.installing import install_command
from kvlinker.doors.http import pages
from kvlinker.doors.http.edge.guards import Drain, add_guards
from kvlinker.doors.http.edge.request_spans import telemetry_options
from kvlinker.settings import Settings
from kvlinker_fleet import views
from kvlinker_fleet.backends import Backends, Find
from kvlinker_fleet.proxy import Proxy
from kvlinker_fleet.router import Router

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from kvlinker_fleet.kv_events import KVEvents

MOST_CONNECTIONS = 1000
"""The most idle connections to replicas that are kept. Chosen by hand."""

IDLE_SECONDS = 2.0
"""The seconds after which an idle connection is closed: before the server does so."""

ANSWER_SECONDS = 600.0
"""The seconds without a byte after which a request at a replica fails."""


def create_router(
    find: Find,
    settings: Settings,
    *,
    api_key: str | None,
    tracer_provider: TracerProvider | None = None,
    kv_events: Mapping[str, str] | None = None,
) -> FastAPI:
    """Make an app that passes requests on to the servers that ``find`` finds, which it asks with
    ``api_key``. Keys, hosts, bodies and slow clients are checked before anything is passed on.
    ``tracer_provider`` takes the requests' traces; None for OpenTelemetry's global one, if there is
    any. ``kv_events`` has the ZeroMQ addresses at which plain vLLM servers publish their blocks, by
    URL."""
    router = Router()
    client = httpx.AsyncClient(
        limits=httpx.Limits(
            max_connections=None,
            max_keepalive_connections=MOST_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
        ),
        timeout=httpx.Timeout(ANSWER_SECONDS, connect=5.0),
        trust_env=False,
        headers={"Accept-Encoding": "identity"},
        # what a replica sets is for its client, not for all
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )
    backends = Backends(find, router, client, api_key)
    events = _follow_events(router, client, kv_events) if kv_events else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backends.start()
        if events is not None:
            events.start()
        try:
            yield
        finally:
            if events is not None:
                await events.stop()
            await backends.stop()
            await client.aclose()

    app = FastAPI(
        title="kvlinker router",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry=telemetry_options(tracer_provider),
    )
    drain = Drain(settings.drain_timeout)
    app.state.drain = drain
    add_guards(app, settings, drain, body_limits=backends.body_limits)

    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        """Check whether any replica answers requests."""
        wrong = "draining" if drain.began else backends.missing()
        if wrong is not None:
            response.status_code = 503
        return {"status": wrong or "ok"}

    @app.get("/live")
    async def live() -> dict[str, str]:
        """Check that the router runs."""
        return {"status": "alive"}

    app.include_router(views.routes(router, backends))
    app.include_router(pages.router)
    app.router.default = Proxy(router, backends, client, events)
    return app


def _follow_events(
    router: Router, client: httpx.AsyncClient, endpoints: Mapping[str, str]
) -> KVEvents:
    """Return the follower of vLLM servers' events. Raises InvalidRequestError if its packages are
    not installed."""
    try:
        from kvlinker_fleet.kv_events import KVEvents
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"Events of vLLM need {error.name}: install it with  {install_command('kv-events')}",
            param="kv_events",
        ) from error
    return KVEvents(router, client, endpoints)
