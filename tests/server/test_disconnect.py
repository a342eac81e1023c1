"""Clients that go away free what the engine held for them."""

from __future__ import annotations

import logging
import threading

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "max_tokens": 1500, "n": 2}


def wait_until_running(served: Served, requests: int) -> None:
    for _ in range(1000):
        if served.llm.load().running >= requests:
            return
        threading.Event().wait(0.005)
    raise TimeoutError("the requests do not start")


def test_closed_stream_frees_the_engine(served: Served) -> None:
    with served.http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the response ends with its iterator
        next(lines)
        wait_until_running(served, 2)
        assert served.llm.load().slots_used > 0
    assert served.becomes_idle()


def test_dropped_request_frees_the_engine(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        served.post(CHAT, ENDLESS, timeout=0.3)
    assert served.becomes_idle(1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_before_the_first_token_are_noticed(faked: Served, engine: FakeEngine, stream: bool) -> None:
    engine.flowing.clear()
    with (
        pytest.raises(httpx.ReadTimeout),
        faked.http.stream("POST", CHAT, json=ENDLESS | {"stream": stream}, timeout=0.3) as answer,
    ):
        for _ in answer.iter_lines():
            pass
    assert engine.wait_until_idle(1.0)
    assert engine.cancelled == 2
    assert faked.get("/health").status_code == 200


def test_a_client_that_leaves_before_its_answer_begins_has_no_status(
    faked: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvlinker.server.edge.access_log")
    engine.flowing.clear()
    with pytest.raises(httpx.ReadTimeout):
        faked.post(CHAT, ENDLESS, timeout=0.3)
    assert engine.wait_until_idle(1.0)
    for _ in range(200):
        if caplog.records:
            break
        threading.Event().wait(0.02)
    assert f"POST {CHAT} - " in caplog.text


def test_shutdown_frees_the_engine(faked: Served, engine: FakeEngine) -> None:
    engine.flowing.clear()
    with faked.http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the response ends with its iterator
        next(lines)
        assert engine.load().running == 2
        faked.llm.close()
        assert engine.wait_until_idle()
