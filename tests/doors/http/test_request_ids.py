"""Requests keep the ids that clients give them: in answers, errors, streams, and the log."""

from __future__ import annotations

import logging

import pytest

from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served
from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
}


def test_a_clients_id_is_kept(served: Served, subtests: pytest.Subtests) -> None:
    for path, body in ASKED.items():
        for added in ({}, {"stream": True}, {"temperature": "hot"}):
            with subtests.test(path, **added):
                answer = served.post(path, body | added, headers={"X-Request-Id": "mine-1"})
                assert answer.status_code == (400 if "temperature" in added else 200)
                assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert served.get("/nowhere", headers={"X-Request-Id": "a/b"}).headers["x-request-id"] == "a/b"


def test_anthropics_clients_find_the_id_where_they_look(served: Served) -> None:
    body = ASKED["/v1/messages"]
    headers = {"X-Request-Id": "mine-3", "anthropic-version": "2023-06-01"}
    for failing in ({}, {"temperature": "hot"}):
        answer = served.post("/v1/messages", body | failing, headers=headers)
        assert answer.headers["request-id"] == "mine-3"
    assert "request-id" not in served.post("/v1/messages", body).headers


def test_the_log_has_a_clients_id(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvlinker"):
        served.get("/v1/models", headers={"X-Request-Id": "mine-2"})
        wait_until(lambda: " id=mine-2" in caplog.text)  # it is written behind the answer


def test_failures_are_told_by_a_clients_id(
    faked: Served, engine: FakeEngine, subtests: pytest.Subtests
) -> None:
    for path, body in ASKED.items():
        with subtests.test(path):
            engine.fails_at = 1
            mine = f"mine-{path}"
            body = body | {"stream": True}
            answer = faked.post(path, body, headers={"X-Request-Id": mine})
            assert f"Its log says why, under {mine}." in answer.text
    error = faked.post("/v1/messages", {}, headers={"X-Request-Id": "mine"}).json()
    assert error["request_id"] == "mine"


def test_ids_that_are_no_word_are_replaced(served: Served, subtests: pytest.Subtests) -> None:
    for given in ("", "two words", "x" * 129, "caf\u00e9", "a\tb"):
        with subtests.test(given[:10]):
            headers = {b"X-Request-Id": given.encode("latin-1")}
            told = served.http.get("/v1/models", headers=headers).headers["x-request-id"]
            assert told.startswith("req_")
    longest = "x" * 128
    answer = served.get("/health", headers={"X-Request-Id": longest})
    assert answer.headers["x-request-id"] == longest
