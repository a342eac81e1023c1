"""Traces by OpenTelemetry how requests were answered: a span for each choice, with one for each of
its stages.

FastAPI makes the span of the HTTP request around them. Without the extra ``otel``, or if
OpenTelemetry is not set up, nothing is traced, and requests are not slowed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvlinker.engines.contract.contract import Failed, Finished
from kvlinker.service.reading import ReadPrompt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

STAGES = ("load", "queue", "link", "decode")
"""The stages of a choice in their order; each is a field of ``Timing`` and the name of a span."""


class Tracing:
    """Makes the traces of requests' choices."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """With None for ``provider``, the one that a program has set up for itself is used. Raises
        ImportError if OpenTelemetry is not installed."""
        from opentelemetry import trace

        self._tracer = trace.get_tracer("kvlinker", version("kvlinker"), provider)

    @classmethod
    def if_installed(cls, provider: TracerProvider | None = None) -> Tracing | None:
        """Make one; None if OpenTelemetry is not installed."""
        try:
            return cls(provider)
        except ImportError:
            return None

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """Return the trace of the choices of the HTTP request that the caller answers, and that has
        these headers.

        Their spans belong to the request's span, or, where it has none, to the one that
        ``traceparent`` names.
        """
        from opentelemetry import context, propagate, trace

        is_traced = trace.get_current_span().get_span_context().is_valid
        return RequestTrace(
            self._tracer, context.get_current() if is_traced else propagate.extract(headers)
        )


class RequestTrace:
    """Traces the choices of one HTTP request."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        """Begin now; spans belong to the one of ``parent``."""
        self._tracer = tracer
        self._parent = parent
        self._begun = time.time_ns()

    def ended(self, choice: int, prompt: ReadPrompt, event: Finished | Failed) -> None:
        """Make the spans of a choice that ends now; ``choice`` is its number among those of its
        prompt."""
        now = time.time_ns()
        finished = event if isinstance(event, Finished) else None
        stages = [] if finished is None else _stages(finished, now)
        span = self._tracer.start_span(
            "generate",
            self._parent,
            attributes={
                "kvlinker.policy": prompt.policy.name,
                "kvlinker.chunks": len(prompt.prompt.spans),
                "kvlinker.choice": choice,
                **_usage(event),
            },
            start_time=stages[0][1] if stages else self._begun,
        )
        if not span.is_recording():
            return
        from opentelemetry import trace

        if finished is None:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span, self._parent)
        for name, begin, end in stages:
            self._tracer.start_span(name, inside, start_time=begin).end(end)
        span.end(now)


def _usage(event: Finished | Failed) -> dict[str, Any]:
    """Return the attributes of a choice's span: how it ended, and its costs."""
    if isinstance(event, Failed):
        return {"error.type": event.error.code}
    usage = event.usage
    return {
        "kvlinker.tokens.cached": usage.cached_tokens,
        "kvlinker.tokens.exact_cached": usage.exact_cached_tokens,
        "kvlinker.tokens.recomputed": usage.recomputed_tokens,
        "kvlinker.tokens.fresh": usage.fresh_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.response.finish_reasons": (event.reason,),
    }


def _stages(finished: Finished, now: int) -> list[tuple[str, int, int]]:
    """Return the name, begin and end of each stage of a choice that ends ``now``; times are in
    nanoseconds of Unix time, and stages that took no time are left out."""
    stages = []
    for name in reversed(STAGES):
        begin = now - round(getattr(finished.timing, name) * 1e9)
        if begin < now:
            stages.append((name, begin, now))
        now = begin
    return stages[::-1]
