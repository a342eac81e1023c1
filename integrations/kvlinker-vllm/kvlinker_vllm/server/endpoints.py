"""vLLM's entry point ``vllm.endpoint_plugins``, which brings kvlinker's routes into vLLM's own
server.

Load it with ``VLLM_PLUGINS=kvlinker``. kvlinker's application is put before vLLM's routes, and
answers requests to its own routes, and requests with linking; all others are vLLM's, and
``/metrics`` includes kvlinker's figures.
"""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar

import prometheus_client
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.http.app import create_app
from kvlinker.doors.http.edge.address import is_loopback
from kvlinker.doors.http.models import ServedModel
from kvlinker.llm import LLM
from kvlinker.settings import Settings
from kvlinker_vllm.adapter import load_chat_template
from kvlinker_vllm.frontend.client import VLLMClient
from kvlinker_vllm.frontend.source import VLLMSource
from kvlinker_vllm.options import ConnectorOptions, connector_settings
from kvlinker_vllm.plugin import NAME
from kvlinker_vllm.protocol.signature import PlanSigner
from kvlinker_vllm.server.overriding_routes import OverridingRoutes
from kvlinker_vllm.server.route_override import RouteOverride

logger = logging.getLogger("kvlinker.vllm.server.endpoints")

ALL_ADDRESSES = "0.0.0.0"
"""The address that vLLM binds to unless it is given another."""


class KVLinkerEndpoints:
    """vLLM's ``EndpointPlugin``; there is one per server."""

    name = "kvlinker"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def __init__(self) -> None:
        self._running = AsyncExitStack()

    def attach_router(self, app: FastAPI) -> None:
        self._diversion = RouteOverride(app)
        app.router.routes.insert(0, self._diversion)
        outer = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(running: Any) -> AsyncIterator[Any]:
            async with self._running, outer(running) as state:
                yield state

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start kvlinker over vLLM's engine client.

        Raises InvalidRequestError if vLLM was started without the connector, and the errors of an
        LLM.
        """
        settings = settings_of(engine_client.vllm_config, args)
        if is_open(settings, args):
            logger.warning(
                "This server listens on %s without any API key: anybody who reaches it may read,"
                " change and delete all context caches. Set api_keys in"
                " kv_connector_extra_config or KVLINKER_API_KEYS, or vLLM's --api-key.",
                settings.host,
            )
        client = VLLMClient(
            engine_client, asyncio.get_running_loop(), PlanSigner.of(settings.state_dir)
        )
        llm = await run_in_threadpool(_start, settings, client, engine_client.vllm_config)
        app = create_app(llm, settings)
        linked = OverridingRoutes(self._diversion, llm, state.online_renderer).router
        replaced = {route.path for route in linked.routes if isinstance(route, APIRoute)}
        app.router.routes[:] = [
            route for route in app.router.routes if getattr(route, "path", None) not in replaced
        ]
        app.include_router(linked)
        await self._running.enter_async_context(app.router.lifespan_context(app))
        served: ServedModel = app.state.served
        prometheus_client.REGISTRY.register(served.metrics.registry)
        self._running.callback(prometheus_client.REGISTRY.unregister, served.metrics.registry)
        self._diversion.app = app


def is_open(settings: Settings, args: Namespace) -> bool:
    """Return whether clients on other machines may do anything: neither kvlinker nor vLLM requires
    a key."""
    has_key = (
        settings.accepted_keys or getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY")
    )
    return not has_key and not is_loopback(settings.host)


def _start(settings: Settings, client: VLLMClient, vllm_config: Any) -> LLM:
    return LLM.from_source(VLLMSource(vllm_config, settings, lambda: client), settings)


def settings_of(vllm_config: Any, args: Namespace) -> Settings:
    """Return kvlinker's settings for this vLLM: the connector's options, and the model's.

    Raises InvalidRequestError if vLLM was started without the connector, and where answers are to
    be audited.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != NAME:
        raise InvalidRequestError(
            "kvlinker's routes need its connector. Start vLLM with --kv-transfer-config "
            f'\'{{"kv_connector": "{NAME}", "kv_role": "kv_both", "kv_load_failure_policy":'
            ' "recompute"}\'.',
            param="kv_transfer_config",
        )
    options = dict(transfer.kv_connector_extra_config)
    ConnectorOptions.pop_from(options)
    model = vllm_config.model_config
    served = getattr(args, "served_model_name", None)
    settings = connector_settings(
        {
            "engine": "vllm",
            "model": model.model,
            "chat_template": load_chat_template(getattr(args, "chat_template", None)),
            "served_model_name": ",".join(served) if served else None,
            "dtype": str(model.dtype).removeprefix("torch."),
            "trust_remote_code": model.trust_remote_code,
            "max_running": vllm_config.scheduler_config.max_num_seqs,
            "host": getattr(args, "host", None) or ALL_ADDRESSES,
        }
        | options
    )
    if settings.audit:
        raise InvalidRequestError(
            "The answers of vLLM's own server are its handlers', so that they cannot be audited,"
            " and no quality target can be kept. Leave out audit and quality_target, or serve the"
            " model with kvlinker serve --engine vllm.",
            param="audit",
        )
    return settings
