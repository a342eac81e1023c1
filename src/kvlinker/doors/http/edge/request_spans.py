"""Traces HTTP requests by OpenTelemetry, with spans that FastAPI makes: their provider and
attributes. Without the extra ``otel``, or if OpenTelemetry is not set up, nothing is traced."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvlinker.base.installing import install_command

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig
    from opentelemetry.trace import TracerProvider

logger = logging.getLogger(__name__)

EXTRA = "otel"
NOT_TRACED = frozenset({"/health", "/live", "/ping", "/metrics", "/status", "/v1/residency"})
"""Routes that probes, collectors and routers ask all the time."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def provider_from_environment() -> TracerProvider | None:
    """Return an OpenTelemetry tracer provider that exports by OTLP, as the SDK's own variables say.

    None if they name no endpoint, or turn traces off; and, with a warning in the log, without the
    extra ``otel``.
    """
    if (
        not any(os.environ.get(name) for name in _ENDPOINTS)
        or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import (
            SERVICE_NAME,
            SERVICE_VERSION,
            OTELResourceDetector,
            Resource,
        )
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning(
            "Requests are not traced: OTEL_* variables ask for it, but need %s",
            install_command(EXTRA),
        )
        return None
    own = Resource({SERVICE_NAME: "kvlinker", SERVICE_VERSION: version("kvlinker")})
    provider = TracerProvider(
        resource=Resource.create().merge(own).merge(OTELResourceDetector().detect())
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def telemetry_options(provider: TracerProvider | None) -> TelemetryConfig:
    """Return FastAPI's options for spans of HTTP requests, and of nothing else; FastAPI before
    0.143 knows none.

    ``provider`` is a tracer provider; with None, the one that a program has set up for itself is
    used.
    """
    return {
        "tracer_provider": provider,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": _is_probe,
    }


def _is_probe(scope: MutableMapping[str, Any]) -> bool:
    return scope["path"] in NOT_TRACED


def headers_of_trace() -> dict[str, str]:
    """Return the headers by which another server that is asked now belongs to the present request's
    span; none where that is not traced."""
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return {}
    headers: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        TraceContextTextMapPropagator().inject(headers)
    return headers


def note_attributes(**attributes: str | int) -> None:
    """Write attributes to the present request's span, where it is traced; their names have dots in
    the places of underscores."""
    try:
        from opentelemetry import trace
    except ImportError:
        return
    span = trace.get_current_span()
    for name, value in attributes.items():
        span.set_attribute(name.replace("_", "."), value)
