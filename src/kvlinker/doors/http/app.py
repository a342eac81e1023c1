"""The application: routes, errors, access, its description, and its background task; for the CLI
and tests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvlinker.base.errors import KVLinkerError
from kvlinker.doors.http import (
    audit,
    context_caches,
    embeddings,
    link,
    models,
    pages,
    residency,
    status,
    tokenize,
)
from kvlinker.doors.http.answers import chat, completions
from kvlinker.doors.http.edge.bodies import prompt_body_bytes
from kvlinker.doors.http.edge.errors import error_model, error_responses
from kvlinker.doors.http.edge.guards import (
    OPEN_PATHS,
    PROBES,
    Drain,
    add_guards,
    refuse_unknown_query,
)
from kvlinker.doors.http.edge.request_spans import telemetry_options
from kvlinker.doors.http.fields.bodies import LeftOut
from kvlinker.doors.http.messages import routes as messages
from kvlinker.doors.http.messages.routes import MessageStreamEvent
from kvlinker.doors.http.metrics import Metrics
from kvlinker.doors.http.models import EmbeddingTurns, ServedModel, Tracing
from kvlinker.doors.http.responses import routes as responses
from kvlinker.doors.http.responses.routes import ResponseStreamEvent
from kvlinker.llm import LLM
from kvlinker.service.context_caches import ContextCaches
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

SWEEP_SECONDS = 5.0

PROMPT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/link/explain",
    "/tokenize",
)
"""The routes whose bodies hold prompts, and need not be larger than those."""

logger = logging.getLogger(__name__)

_SCHEMA = "#/components/schemas/{model}"
_STREAMED: tuple[type[BaseModel], ...] = (
    chat.ChatCompletionChunk,
    completions.CompletionChunk,
    MessageStreamEvent,
    ResponseStreamEvent,
)


def create_app(
    llm: LLM,
    settings: Settings,
    tracer_provider: TracerProvider | None = None,
    failure: str | None = None,
) -> FastAPI:
    """Make an app that serves ``llm`` and closes it when it shuts down.

    ``tracer_provider`` takes the requests' traces; None for OpenTelemetry's global one, if there is
    any. ``failure`` says why another model is not served in the place of this one. The framework's
    documentation pages are off, for they load scripts from elsewhere: /docs is kvlinker's own.
    """
    metrics = Metrics(llm)
    llm.events.subscribe(metrics.count)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(llm.policy_manager.resume, llm.catalog.audit)
        sweeper = asyncio.create_task(sweep_forever(llm.caches))
        try:
            yield
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await run_in_threadpool(llm.close)

    app = _App(
        title="kvlinker",
        version=version("kvlinker"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(refuse_unknown_query)],
        telemetry=telemetry_options(tracer_provider),
    )
    drain = Drain(settings.drain_timeout)
    limits = dict.fromkeys(PROMPT_PATHS, prompt_body_bytes(llm.max_model_len))
    app.state.served = ServedModel(
        llm,
        settings,
        metrics,
        drain,
        EmbeddingTurns(settings.max_waiting),
        limits,
        Tracing.if_installed(tracer_provider),
        failure=failure,
    )
    add_guards(app, settings, drain, body_limits=limits)
    resources = (
        audit,
        chat,
        completions,
        messages,
        responses,
        context_caches,
        embeddings,
        link,
        models,
        residency,
        status,
        tokenize,
        pages,
    )
    for resource in resources:
        app.include_router(resource.router)
    return app


async def sweep_forever(caches: ContextCaches, interval: float = SWEEP_SECONDS) -> None:
    """Delete expired context caches every ``interval`` seconds until cancelled.

    A sweep that fails is tried again, and logged unless the one before failed alike.
    """
    known = None
    while True:
        await asyncio.sleep(interval)
        try:
            await run_in_threadpool(caches.sweep)
            known = None
        except KVLinkerError as error:
            if error.message != known:
                known = error.message
                logger.error("Expired context caches are not deleted for now: %s", error.message)
        except Exception:
            logger.exception(
                "Expired context caches could not be deleted; trying again in %s s", interval
            )


class _App(FastAPI):
    """Describes the parts that the framework does not know: keys, errors that all routes share, and
    the events of streams."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError", LeftOut.__name__):
                schemas.pop(unused, None)
            chunks = models_json_schema(
                [(model, "validation") for model in _STREAMED], ref_template=_SCHEMA
            )[1]
            schemas |= chunks["$defs"]
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    self._complete(path, operation)
            if self.state.keyed:
                document["components"]["securitySchemes"] = {
                    "key": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                }
        return self.openapi_schema or {}

    def _complete(self, path: str, operation: dict[str, Any]) -> None:
        """Add the errors that middlewares answer, and drop the framework's own, which are never
        sent."""
        responses = operation["responses"]
        responses.pop("422", None)
        shared = [400, 500] if path in PROBES else [400, 500, 503]
        if "requestBody" in operation:
            shared += [408, 413, 415]
        if self.state.hosts_checked:
            shared.append(421)
        if self.state.keyed and path not in OPEN_PATHS:
            operation["security"] = [{"key": []}, {"x-api-key": []}]
            shared.append(401)
        for code, response in error_responses(*shared, model=error_model(path)).items():
            schema = {"$ref": _SCHEMA.format(model=response.pop("model").__name__)}
            responses[str(code)] = {**response, "content": {"application/json": {"schema": schema}}}
        operation["responses"] = dict(sorted(responses.items()))
