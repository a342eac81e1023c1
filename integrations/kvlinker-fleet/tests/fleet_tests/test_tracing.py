"""A trace goes from the caller through the router to the server, and no header is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from tests.doors.http.serving import listening, tiny_model, tiny_settings
from tests.doors.http.test_tracing import CALLER, CALLER_SPAN, CALLER_TRACE, CHAT, Spans
from tests.waiting import PATIENCE

from fleet_tests.test_routing_over_http import asked
from kvlinker.doors.http.app import create_app
from kvlinker.llm import LLM
from kvlinker_fleet.app import create_router
from kvlinker_fleet.backends import always


@pytest.fixture
def spans() -> Spans:
    return Spans()


def test_router_and_server_are_in_the_callers_trace(tmp_path: Path, spans: Spans) -> None:
    settings = tiny_settings(tmp_path)
    server_spans = Spans()
    with ExitStack() as stack:
        llm = LLM.from_model(tiny_model(), settings)
        app = create_app(llm, settings, server_spans.provider)
        server = stack.enter_context(listening(app, settings))
        router = create_router(
            always([server]), settings, api_key=None, tracer_provider=spans.provider
        )
        url = stack.enter_context(listening(router, settings))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
        assert client.post(CHAT, json=asked(), headers=CALLER).status_code == 200
        (routed,) = spans.take("POST")
        served = {span.name: span for span in server_spans.take(f"POST {CHAT}")}
    assert routed.parent is not None
    assert f"{routed.parent.span_id:016x}" == CALLER_SPAN
    answered = served[f"POST {CHAT}"]
    assert answered.parent is not None
    assert answered.parent.span_id == routed.context.span_id
    for span in (routed, *served.values()):
        assert f"{span.context.trace_id:032x}" == CALLER_TRACE
    attributes = dict(routed.attributes or {})
    assert attributes["kvlinker.replica"] == server.removeprefix("http://")
    assert attributes["kvlinker.chunks"] == 0


class Echo(BaseHTTPRequestHandler):
    """Remembers the headers of requests."""

    def do_GET(self) -> None:
        self.server.got.append(dict(self.headers.items()))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def echo() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Echo)
    server.got = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("traced", [True, False])
def test_headers_are_passed_on(
    tmp_path: Path, echo: HTTPServer, spans: Spans, traced: bool
) -> None:
    settings = tiny_settings(tmp_path)
    headers = CALLER | {
        "tracestate": "vendor=1",
        "baggage": "user=anna",
        "x-request-id": "mine",
        "x-own": "kept",
    }
    app = create_router(
        always([f"http://127.0.0.1:{echo.server_port}"]),
        settings,
        api_key=None,
        tracer_provider=spans.provider if traced else None,
    )
    with (
        listening(app, settings) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, headers=headers) as client,
    ):
        assert client.get("/v1/models").status_code == 200
    (got,) = [each for each in echo.got if each.get("x-own")]  # type: ignore[attr-defined]
    got = {name.lower(): value for name, value in got.items()}
    for name in ("tracestate", "baggage", "x-request-id", "x-own"):
        assert got[name] == headers[name]
    version, trace, span, _ = got["traceparent"].split("-")
    assert (version, trace) == ("00", CALLER_TRACE)
    assert (span != CALLER_SPAN) == traced
