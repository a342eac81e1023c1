"""The router's application: what it answers itself, and the proxy for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Literal

import httpx
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from kvlinker.doors.http.edge.draining import Drain
from kvlinker.doors.http.edge.guards import add_guards
from kvlinker.doors.http.metrics import CONTENT_TYPE
from kvlinker.fleet.backends import Backends
from kvlinker.fleet.metrics import with_replica
from kvlinker.fleet.proxy import Proxy
from kvlinker.fleet.router import Router
from kvlinker.settings import Settings

MOST_CONNECTIONS = 1000
IDLE_SECONDS = 2.0
"""The seconds after which an idle connection is closed: before the server does so."""

ANSWER_SECONDS = 600.0
"""The seconds after which a replica that sends nothing more is given up."""


class ReplicaStatus(BaseModel):
    """How a replica is. Counts are those of its last report."""

    id: str
    address: str
    state: Literal["ready", "dead"]
    running: int
    waiting: int
    resident_chunks: int
    epoch: str | None


class FleetStatus(BaseModel):
    """How all replicas are."""

    replicas: list[ReplicaStatus]


def create_router(urls: Sequence[str], settings: Settings, *, api_key: str | None) -> FastAPI:
    """Make an app that passes requests on to the servers at ``urls``, which it asks with
    ``api_key``. Keys, hosts, bodies and slow clients are checked before anything is passed on."""
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
    backends = Backends(urls, router, client, api_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backends.start()
        try:
            yield
        finally:
            await backends.stop()
            await client.aclose()

    app = FastAPI(
        title="kvlinker router",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    drain = Drain(settings.drain_timeout)
    app.state.drain = drain
    add_guards(app, settings, drain, body_limits={})

    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        """Tell whether some replica takes requests."""
        if drain.began or not any(each.ready for each in router.replicas.values()):
            response.status_code = 503
            return {"status": "draining" if drain.began else "no replica is ready"}
        return {"status": "ok"}

    @app.get("/live")
    async def live() -> dict[str, str]:
        """Tell that the router runs."""
        return {"status": "alive"}

    @app.get("/status")
    async def status() -> FleetStatus:
        """Tell how all replicas are."""
        return FleetStatus(
            replicas=[
                ReplicaStatus(
                    id=view.id,
                    address=backends.urls[view.id],
                    state="ready" if view.ready else "dead",
                    running=view.running,
                    waiting=view.waiting,
                    resident_chunks=view.chunks,
                    epoch=view.epoch,
                )
                for view in router.replicas.values()
            ]
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Tell the metrics of all replicas that are ready, each with its label."""
        ready = [view.id for view in router.replicas.values() if view.ready]
        texts = await asyncio.gather(*map(backends.metrics, ready))
        told = dict(zip(ready, texts, strict=True))
        return Response(with_replica(told), media_type=CONTENT_TYPE)

    app.router.default = Proxy(router, backends, client)
    return app
