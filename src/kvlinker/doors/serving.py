"""The application of a server with either engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from kvlinker.doors.http.app import create_app
from kvlinker.llm import LLM
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def create_server(llm: LLM, settings: Settings, provider: TracerProvider | None) -> FastAPI:
    """Make the app that serves ``llm``, with the rest of vLLM's routes where vLLM is its engine.
    ``provider`` takes the traces."""
    app = create_app(llm, settings, provider)
    if settings.engine == "vllm":
        from kvlinker.doors.vllm_server.other_routes import add_other_routes

        add_other_routes(app, llm.engine, settings)
    return app
