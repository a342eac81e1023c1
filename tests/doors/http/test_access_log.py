"""The access log: one line per request, with figures and without content, written by a thread that
nobody waits for."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from kvlinker.doors.http.edge.access_log import QUEUED_LINES, JsonLines, logging_to_stderr
from tests.doors.http.serving import Served

LOGGER = "kvlinker.doors.http.edge.access_log"
CHAT = "/v1/chat/completions"
SECRET = "a secret text"


class Lines(logging.Handler):
    """Keeps records, and waits for the one of a request: it is logged when the client has its
    answer already."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self._records.append(record)
            self._changed.notify_all()

    def of(self, request_id: str) -> str:
        return self.record_of(request_id).getMessage()

    def record_of(self, request_id: str) -> logging.LogRecord:
        def found() -> list[logging.LogRecord]:
            return [record for record in self._records if record.getMessage().endswith(request_id)]

        with self._changed:
            assert self._changed.wait_for(found, 10), self._records
            (record,) = found()
            return record


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_per_request(served: Served, lines: Lines, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": stream,
    }
    answer = served.post(CHAT, body)
    prompt = served.post("/tokenize", {"messages": body["messages"]})
    request_id = answer.headers["x-request-id"]
    count = prompt.json()["count"]
    link = r"cached=(\d+) recomputed=0 fresh=(\d+) ttft_ms=(\d+\.\d) policy=(\S+)"
    tokens = f"prompt_tokens={count} output_tokens=3"
    found = re.fullmatch(
        rf"POST {CHAT} 200 {tokens} {link} ms=\d+\.\d id={request_id}", lines.of(request_id)
    )
    assert found is not None
    assert int(found[1]) + int(found[2]) == count
    assert float(found[3]) > 0
    assert found[4] == served.llm.default_policy().name
    assert f" /tokenize 200 prompt_tokens={count} " in lines.of(prompt.headers["x-request-id"])


WITHOUT_CONTENT = [
    ("GET", "/health", "GET /health 200"),
    ("HEAD", "/health", "HEAD /health 200"),
    ("GET", f"/v1/context_caches/{SECRET}", "GET /v1/context_caches/{cache_id} 404"),
    ("GET", f"/v1/context_caches?metadata[a]={SECRET}", "GET /v1/context_caches 200"),
    ("GET", f"/{SECRET}", "GET - 404"),
    ("PUT", "/health", "PUT /health 405"),
    ("POST", CHAT, f"POST {CHAT} 400"),
]


def test_routes_without_content(served: Served, lines: Lines, subtests: pytest.Subtests) -> None:
    for method, path, said in WITHOUT_CONTENT:
        with subtests.test(f"{method} {path}"):
            line = lines.of(served.http.request(method, path).headers["x-request-id"])
            assert line.startswith(f"{said} prompt_tokens=0 output_tokens=0 ms=")
            assert "secret" not in line


@pytest.mark.parametrize(
    ("path", "route", "status"),
    [("/v1/context_caches/none", "/v1/context_caches/{cache_id}", 404), ("/x", None, 404)],
)
def test_a_request_as_json(
    served: Served, lines: Lines, path: str, route: str | None, status: int
) -> None:
    request_id = served.get(path).headers["x-request-id"]
    record = lines.record_of(request_id)
    fields = json.loads(JsonLines().format(record))
    assert (fields["level"], fields["logger"], fields["message"]) == (
        "info",
        LOGGER,
        record.getMessage(),
    )
    assert (fields["method"], fields["route"], fields["status"], fields["id"]) == (
        "GET",
        route,
        status,
        request_id,
    )
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (0, 0)
    assert f" ms={fields['ms']} " in fields["message"]


def test_those_without_a_key_are_logged(keyed: Served, lines: Lines) -> None:
    line = lines.of(keyed.get("/v1/models").headers["x-request-id"])
    assert line.startswith("GET - 401 ")


def test_creation_and_splitting_tell_their_tokens(served: Served, lines: Lines) -> None:
    answer = served.post("/v1/context_caches", {"chunks": ["the first", "a second"]})
    tokens = sum(entry["tokens"] for entry in answer.json()["data"])
    assert f"prompt_tokens={tokens} " in lines.of(answer.headers["x-request-id"])
    answer = served.post("/v1/context_caches/split", {"input": f"{SECRET} {SECRET}"})
    tokens = sum(piece["tokens"] for piece in answer.json()["data"])
    assert f"prompt_tokens={tokens} " in lines.of(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["info", "warning"]),
        ("info", ["info", "warning"]),
        ("warning", ["warning"]),
        ("error", []),
    ],
)
def test_the_level_says_what_is_written(
    capfd: pytest.CaptureFixture[str], level: str, written: list[str]
) -> None:
    with logging_to_stderr(level):
        logging.getLogger("kvlinker.any").info("info")
        logging.getLogger("uvicorn.error").info("uvicorn's info")
        logging.getLogger("kvlinker.any").warning("warning")
    assert [line.split()[-1] for line in capfd.readouterr().err.splitlines()] == written


def test_each_line_is_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, too, stays on the line of its message, and no character can break it."""
    monkeypatch.setattr(
        logging.getLogger("kvlinker"), "propagate", False
    )  # pytest cannot report half a character
    began = datetime.now(UTC)
    with logging_to_stderr("info", "json"):
        logging.getLogger("kvlinker.any").info("two\nlines of %s \ud800", "text")
        try:
            raise ValueError("a cause")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("It failed.")
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert {name: first[name] for name in ("level", "logger", "message")} == {
        "level": "info",
        "logger": "kvlinker.any",
        "message": "two\nlines of text \ud800",
    }
    assert (
        timedelta(seconds=-0.001)
        <= datetime.fromisoformat(first["time"]) - began
        < timedelta(minutes=1)
    )
    assert second["level"] == "error"
    assert re.fullmatch(
        r"It failed\.\nTraceback .*ValueError: a cause", second["message"], re.DOTALL
    )


def test_nobody_waits_for_a_log_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as unread, os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        monkeypatch.setattr("kvlinker.doors.http.edge.access_log.FLUSH_SECONDS", 0.01)
        with logging_to_stderr("info"):
            for number in range(2 * QUEUED_LINES):
                logging.getLogger("kvlinker.any").info("line %d", number)
        os.set_blocking(unread.fileno(), False)
        while unread.read(2**20):  # lets the thread end
            pass
