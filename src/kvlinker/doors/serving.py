"""A server with either engine: its model, and its application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI

from kvlinker.doors.http.app import create_app
from kvlinker.engines.contract.joining import joining_engine
from kvlinker.llm import LLM
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from kvlinker.service.builders import BuilderClient


def builder_client(
    settings: Settings, found: Callable[[], Sequence[str]] | None = None
) -> BuilderClient | None:
    """Return the source of chunks that a server lacks: those builders that ``found`` returns, or
    else those that the settings name; None if there are none, the server is one, or vLLM is its
    engine."""

    def named() -> Sequence[str]:
        return settings.builders

    urls = found or (named if settings.builders else None)
    if urls is None or settings.role == "build" or settings.engine == "vllm":
        return None
    from kvlinker.service.builders import BuilderClient

    return BuilderClient(urls, next(iter(settings.admin_keys), None))


def create_server(
    llm: LLM, settings: Settings, provider: TracerProvider | None, failure: str | None = None
) -> FastAPI:
    """Make the app that serves ``llm``, with the rest of vLLM's routes where vLLM is its engine.
    ``provider`` takes the traces; ``failure`` says why another model is not served."""
    app = create_app(llm, settings, provider, failure)
    if settings.engine == "vllm":
        joining_engine(settings.engine).add_routes(app, llm.engine, settings)
    return app
