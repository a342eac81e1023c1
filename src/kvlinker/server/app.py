"""The application: routes, errors, access, and the tasks that run beside them. The CLI and tests serve it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from kvlinker.config import Settings
from kvlinker.llm import LLM
from kvlinker.server.access import KeyCheck
from kvlinker.server.body_limit import BodyLimit
from kvlinker.server.errors import install_error_handling
from kvlinker.server.metrics import Metrics
from kvlinker.server.routes import ROUTERS
from kvlinker.server.service import Service
from kvlinker.server.sweep import sweep_forever


def create_app(llm: LLM, settings: Settings) -> FastAPI:
    """An app that serves ``llm`` and closes it when it shuts down.

    Documentation pages are off, for they load scripts from elsewhere; the schema is at /openapi.json.
    """
    metrics = Metrics(llm)
    llm.events.subscribe(metrics.count)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(sweep_forever(llm.caches))
        try:
            yield
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await run_in_threadpool(llm.close)

    app = FastAPI(title="kvlinker", version=version("kvlinker"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = Service(llm, settings, metrics)
    app.add_middleware(BodyLimit)
    app.add_middleware(KeyCheck, api_keys=settings.accepted_keys, admin_keys=settings.admin_keys)
    install_error_handling(app)
    for router in ROUTERS:
        app.include_router(router)
    return app
