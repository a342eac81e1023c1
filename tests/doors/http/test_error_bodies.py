"""What error bodies tell: the caller's mistakes in full, of the server's own failures only where to
read of them."""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Scope

import kvlinker
from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    KVLinkerError,
    OverloadedError,
)
from kvlinker.doors.http.answers.answering import UsageBody
from kvlinker.doors.http.answers.dialects import DialectAnswer
from kvlinker.doors.http.edge.errors import UnknownEncodingError, error_body, error_response
from kvlinker.doors.http.messages.routes import MessageAnswer
from kvlinker.doors.http.responses.routes import ResponseAnswer
from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
INSIDE = "/home/operator/state/catalog.sqlite"
SCOPE: Scope = {"type": "http", "path": "/v1/models", "state": {"request_id": "req_1"}}
HOMES = ("kvlinker.store", "kvlinker.doors.http", "kvlinker.doors.client")
"""What defines errors, besides modules that are named after them."""


def all_errors() -> list[type[KVLinkerError]]:
    for module in pkgutil.walk_packages(kvlinker.__path__, "kvlinker."):
        if "error" in module.name or module.name.startswith(HOMES):
            importlib.import_module(module.name)
    importlib.import_module("kvlinker_fleet.proxy")
    found = [KVLinkerError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def made(kind: type[KVLinkerError]) -> KVLinkerError:
    if issubclass(kind, ContextCacheModelError):
        return kind(INSIDE, made_with="a", served="b")
    if issubclass(kind, OverloadedError):
        return kind(INSIDE, retry_after=1)
    if issubclass(kind, UnknownEncodingError):
        return kind(INSIDE, known="gzip")
    return kind(INSIDE)


def test_bodies_of_all_errors(caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests) -> None:
    for kind in all_errors():
        with subtests.test(kind.__name__):
            caplog.clear()
            error = made(kind)
            answer = error_response(error, SCOPE)
            assert answer.status_code == kind.status
            body = json.loads(bytes(answer.body))["error"]
            assert (body["type"], body["code"], body["param"]) == (
                error.type,
                error.code,
                error.param,
            )
            if kind.status == 500:
                assert INSIDE not in body["message"]
                assert "req_1" in body["message"]
                assert body["message"].startswith(kind.summary)
                assert f"Request req_1 failed: {INSIDE}" in caplog.text
            else:
                assert INSIDE in body["message"], "it is the caller's own"
                assert not caplog.records
            assert error_body(error, SCOPE).model_dump()["error"] == body


PLACES = [
    ('{"minimum": 1e999}', "minimum"),
    ('{"properties": {"a": {"enum": [1, -1e999]}}}', "properties.a.enum.1"),
    ('{"list": {"float": 1e999}}', "list.float"),
]


def test_places_are_those_of_the_body(keyed: Served, subtests: pytest.Subtests) -> None:
    """Also in JSON of any kind, and in long bodies."""
    for padding, (schema, place) in product((0, 20_000), PLACES):
        with subtests.test(place, padding=padding):
            message = {"role": "user", "content": "x" * padding}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": "…"}}
            body = json.dumps({"messages": [message], "response_format": form}, ensure_ascii=False)
            answer = keyed.http.post(
                CHAT,
                content=body.replace('"…"', schema),
                headers={"Authorization": "Bearer key-alpha", "Content-Type": "application/json"},
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == f"response_format.json_schema.schema.{place}"


def test_every_answer_names_its_request(keyed: Served) -> None:
    headers = {"Authorization": "Bearer key-alpha"}
    answers = [
        keyed.get("/health"),
        keyed.get("/v1/models"),
        keyed.get("/v1/models", headers=headers),
        keyed.get("/nowhere", headers=headers),
        keyed.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "stream": True}, headers=headers),
        keyed.get("/v1/context_caches/cc_1", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [200, 401, 200, 404, 200, 404]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == len(answers)
    assert all(len(request_id) == len("req_") + 24 for request_id in ids)


def test_a_stream_that_fails_says_nothing_of_the_inside(
    faked: Served,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.fails_at = 1
    with caplog.at_level(logging.ERROR):
        answer = faked.post(CHAT, {"messages": MESSAGES, "max_tokens": 3, "stream": True})
    request_id = answer.headers["x-request-id"]
    (error,) = [line for line in answer.text.splitlines() if '"error"' in line]
    message = json.loads(error.removeprefix("data: "))["error"]["message"]
    assert message == f"The server failed while answering. Its log says why, under {request_id}."
    assert f"Request {request_id} failed: " in caplog.text


@pytest.mark.parametrize(
    ("answer", "path", "asked"),
    [
        (MessageAnswer, "/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
        (ResponseAnswer, "/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ],
)
def test_an_answer_that_cannot_be_told_is_not_the_callers_mistake(
    faked: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: type[DialectAnswer],
    path: str,
    asked: dict[str, Any],
) -> None:
    monkeypatch.setattr(answer, "body", lambda _: UsageBody.model_validate({}))
    refused = faked.post(path, asked)
    assert refused.status_code == 500
    assert f"Request {refused.headers['x-request-id']} (POST {path}) failed" in caplog.text


def test_a_store_that_fails_names_no_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings(tmp_path / "private")
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        (kept,) = served.cache("The cat sat on the mat.")
        for file in settings.state_dir.glob("catalog.sqlite*"):
            file.unlink()
        answers = [
            served.post("/v1/context_caches", {"chunks": ["new"]}),
            served.http.delete(f"/v1/context_caches/{kept}"),
            served.http.patch(f"/v1/context_caches/{kept}", json={"name": "n"}),
            served.http.delete("/v1/context_caches", params={"metadata[a]": "b"}),
        ]
    for answer in answers:
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "store_unusable"
        assert "private" not in answer.text
        request_id = answer.headers["x-request-id"]
        assert request_id in error["message"]
        (logged,) = [
            record.getMessage() for record in caplog.records if request_id in record.getMessage()
        ]
        assert str(settings.state_dir) in logged


def test_not_found_is_told_in_full() -> None:
    assert "cc_1" in error_body(ContextCacheNotFoundError("cc_1"), SCOPE).error.message
