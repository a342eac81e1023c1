"""vLLM's own routes in kvlinker's server: all routes that kvlinker lacks, such as ``/detokenize``
and ``/version``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from kvlinker.base.errors import PermissionDeniedError
from kvlinker.doors.http.edge.errors import error_response
from kvlinker.doors.http.edge.guards import caller_of
from kvlinker.engines.contract.contract import Engine
from kvlinker.settings import Settings
from kvlinker_vllm.frontend.client import VLLMClient
from kvlinker_vllm.frontend.engine import VLLMEngine

T = TypeVar("T")


_ADMINS_ONLY = PermissionDeniedError(
    "This route is vLLM's, which does not keep tenants apart: with API keys it is for admins' keys."
)


class OtherRoutes(BaseRoute):
    """Stands behind kvlinker's routes, and has vLLM's application answer, in the event loop of
    vLLM's engine.

    With API keys it answers admins alone, since vLLM's prefix cache and requests are everybody's.
    """

    def __init__(self, app: FastAPI, client: VLLMClient) -> None:
        self._app = app
        self._client = client

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http":
            return Match.NONE, {}
        found = any(route.matches(scope)[0] is Match.FULL for route in self._app.router.routes)
        return (Match.FULL if found else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not caller_of(scope).admin:
            return await error_response(_ADMINS_ONLY, scope)(scope, receive, send)
        loop = asyncio.get_running_loop()
        # its own dictionary: two applications note in it what they make of the request
        answered = self._client.run(
            self._app(dict(scope), _across(loop, receive), _across(loop, send))
        )
        return await asyncio.wrap_future(answered)


def add_other_routes(app: FastAPI, engine: Engine, settings: Settings) -> None:
    """Add vLLM's routes to kvlinker's application ``app``, whose engine is a ``VLLMEngine``. Takes
    seconds."""
    client = cast(VLLMEngine, engine).client
    app.router.routes.append(
        OtherRoutes(client.run(_vllm_app(client.engine_client, settings)).result(), client)
    )


async def _vllm_app(engine_client: Any, settings: Settings) -> FastAPI:
    """Return vLLM's application over its engine client."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = settings.model
    args.served_model_name = list(settings.served_names)
    args.chat_template = settings.chat_template
    args.structured_outputs_config = engine_client.vllm_config.structured_outputs_config
    args.allowed_origins = []  # kvlinker's server answers no other site's pages
    args.disable_fastapi_docs = True
    tasks = await engine_client.get_supported_tasks()
    app: FastAPI = build_app(args, tasks, engine_client.vllm_config.model_config)
    app.state.endpoint_plugins = []  # kvlinker's server is there already
    await init_app_state(engine_client, app.state, args, tasks)
    return app


def _across(
    loop: asyncio.AbstractEventLoop, call: Callable[..., Awaitable[T]]
) -> Callable[..., Awaitable[T]]:
    """Return a function for another event loop that calls ``call`` in ``loop``."""

    async def cross(*values: Any) -> T:
        async def call_there() -> T:
            return await call(*values)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call_there(), loop))

    return cross
