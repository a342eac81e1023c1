"""Traces of requests: spans of each choice and its stages, within those of the HTTP request and of
its caller."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvlinker.base.installing import install_command
from kvlinker.doors.http.app import create_app
from kvlinker.doors.http.edge.request_spans import provider_from_environment
from kvlinker.doors.http.models import Tracing
from tests.doors.http.serving import Served, listening
from tests.waiting import PATIENCE, wait_until

CHAT = "/v1/chat/completions"
CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}


class Spans:
    """The spans that an exporter has got."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def take(self, last: str) -> list[ReadableSpan]:
        """Return all spans so far and forget them, once there is one of this name: a request's ends
        late."""
        wait_until(lambda: last in {span.name for span in self.exporter.get_finished_spans()})
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


@pytest.fixture(scope="module")
def spans() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def traced(served: Served, spans: Spans) -> Iterator[Served]:
    """The shared server's LLM behind an app with traces."""
    app = create_app(served.llm, served.llm.settings, spans.provider)
    with (
        listening(app, served.llm.settings, closes=False) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        yield Served(url, served.llm, http)


def asking(cache_id: str, **fields: Any) -> Mapping[str, Any]:
    before, behind = {"type": "text", "text": "Well:"}, {"type": "text", "text": "What?"}
    content = [before, {"type": "context_cache", "id": cache_id}, behind]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "ignore_eos": True}
    return {**body, "link": {"policy": "legolink-4"}, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_traced_within_its_callers_trace(
    traced: Served, spans: Spans, stream: bool
) -> None:
    (cache_id,) = traced.cache(f"A chunk of some tokens, stream {stream}.")
    assert [span.name for span in spans.take("POST /v1/context_caches")] == [
        "POST /v1/context_caches"
    ]
    answer = traced.post(CHAT, asking(cache_id, stream=stream), headers=CALLER)
    assert answer.status_code == 200
    found = {span.name: span for span in spans.take(f"POST {CHAT}")}
    assert set(found) == {f"POST {CHAT}", "generate", "load", "queue", "link", "decode"}
    request, generate = found.pop(f"POST {CHAT}"), found.pop("generate")
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == CALLER_SPAN
    assert request.kind == SpanKind.SERVER
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200
    for span in (request, generate, *found.values()):
        assert f"{span.context.trace_id:032x}" == CALLER_TRACE
    assert generate.parent == request.context
    assert all(span.parent == generate.context for span in found.values())

    stages = [found[name] for name in ("load", "queue", "link", "decode")]
    times = [generate.start_time, *(span.start_time for span in stages), generate.end_time]
    assert times == sorted(times)
    assert [span.end_time for span in stages[:-1]] == [span.start_time for span in stages[1:]]
    attributes = dict(generate.attributes or {})
    counts = [attributes[f"kvlinker.tokens.{kind}"] for kind in ("cached", "recomputed", "fresh")]
    assert all(counts)
    assert sum(counts) == attributes["gen_ai.usage.input_tokens"]
    assert (attributes["kvlinker.policy"], attributes["kvlinker.chunks"]) == ("legolink-4", 1)
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_each_choice_has_a_span(served: Served, traced: Served, spans: Spans) -> None:
    (cache_id,) = served.cache("A chunk for two.")
    assert traced.post(CHAT, asking(cache_id, n=2)).status_code == 200
    generated = [span for span in spans.take(f"POST {CHAT}") if span.name == "generate"]
    assert sorted((span.attributes or {})["kvlinker.choice"] for span in generated) == [0, 1]


def test_refusals_have_a_span_and_probes_none(traced: Served, spans: Spans) -> None:
    for path in ("/health", "/metrics", "/status"):
        assert traced.get(path).status_code == 200
    assert traced.post(CHAT, asking("cc_unknown")).status_code == 404
    assert [span.name for span in spans.take(f"POST {CHAT}")] == [f"POST {CHAT}"]


def test_without_an_http_span_the_header_is_heeded(spans: Spans, served: Served) -> None:
    """Behind a server whose framework makes no spans, as vLLM's."""
    from kvlinker.base.errors import EngineClosedError
    from kvlinker.engines.contract.contract import Failed
    from kvlinker.linking import parse_policy
    from kvlinker.service.reading import ReadPrompt

    prompt = ReadPrompt(
        served.llm.chat_prompt([{"role": "user", "content": "Hello"}]), parse_policy("full"), {}
    )
    Tracing(spans.provider).begin(CALLER).ended(
        0, prompt, Failed(EngineClosedError("It is closed."))
    )
    (span,) = spans.take("generate")
    assert f"{span.context.trace_id:032x}" == CALLER_TRACE
    assert span.status.status_code == StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "engine_closed"


def test_the_standard_variables_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provider_from_environment() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    provider: Any = provider_from_environment()
    assert provider.resource.attributes["service.name"] == "kvlinker"
    provider.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "linker-1")
    provider = provider_from_environment()
    assert provider.resource.attributes["service.name"] == "linker-1"
    provider.shutdown()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert provider_from_environment() is None


def test_without_the_extra_requests_are_answered_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert provider_from_environment() is None
    assert install_command("otel") in caplog.text
    assert Tracing.if_installed() is None
