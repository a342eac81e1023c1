"""Clients that go away free what the engine held for them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.engines.embedded.held import Held
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
WAITING = 45
ENDLESS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "ignore_eos": True,
    "max_tokens": 1500,
    "n": 2,
}


@contextmanager
def asked(
    served: Served,
    *,
    stream: bool = False,
    path: str = CHAT,
    fields: Mapping[str, Any] = ENDLESS,
    missing: int = 0,
) -> Iterator[socket.socket]:
    """A client that has sent a request, but for ``missing`` bytes of its body, and is gone behind
    the context."""
    address = urlsplit(served.url)
    body = json.dumps({**fields, "stream": True} if stream else fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body) + missing}\r\n\r\n".encode() + body)
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(served: Served, stream: bool) -> None:
    """The engine is held meanwhile, so that no request ends by itself."""
    engine = cast(EmbeddedEngine, served.llm.engine)
    with Held(engine) as held:
        with asked(served, stream=stream) as client:
            held.let(10)
            assert not stream or client.recv(9) == b"HTTP/1.1 "
            load = served.llm.current_load()
            assert load.running == 2
            assert load.slots_used > 0
        wait_until(lambda: len(engine.scheduler._cancelled) == 2)
    served.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_before_the_first_token_are_noticed(
    faked: Served, engine: FakeEngine, stream: bool
) -> None:
    engine.flowing.clear()
    with asked(faked, stream=stream):
        engine.wait_until_running(2)
    engine.wait_until_idle()
    assert engine.cancelled == 2
    assert faked.get("/health").status_code == 200


def test_the_log_says_that_a_client_left_and_how_much_was_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    """Not that it was answered, though a stream's status was sent; who asks again goes on there."""
    caplog.set_level(logging.INFO, "kvlinker.doors.http.edge.access_log")
    settings = tiny_settings(tmp_path, prefix_cache="on", max_step_tokens=32)
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        for stream in (False, True):
            with subtests.test(stream=stream):
                caplog.clear()
                _leave_while_prefilling(served, caplog, stream=stream)


def _leave_while_prefilling(
    served: Served, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    engine = cast(EmbeddedEngine, served.llm.engine)
    content = f"{stream} is how it begins, and it goes on: " + "so many words " * 10
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    with Held(engine) as held:
        with asked(served, stream=stream, fields=fields) as client:
            held.let(2)
            assert not stream or client.recv(9) == b"HTTP/1.1 "
        wait_until(lambda: engine.scheduler._cancelled)
    # Another request's line may come late, behind its answer.
    wait_until(lambda: _told_with(caplog, 499))
    (told,) = _told_with(caplog, 499)
    assert told["output_tokens"] == 0
    assert f"POST {CHAT} 499 prompt_tokens={told['prompt_tokens']} " in caplog.text
    computed: int = told["cached"] + told["recomputed"] + told["fresh"]
    assert told["uncomputed"] == told["prompt_tokens"] - computed > 0
    assert computed == 3 * 32
    assert "ttft_ms" not in told
    recent = served.get("/status").json()["recent"][0]
    assert (recent["fresh"], recent["uncomputed"]) == (told["fresh"], told["uncomputed"])
    usage = served.post(CHAT, fields).json()["usage"]
    assert usage["prompt_tokens_details"]["exact_cached_tokens"] == computed


def _told_with(caplog: pytest.LogCaptureFixture, status: int) -> list[dict[str, Any]]:
    """What the access log's lines with this status say."""
    requests = [cast(Any, line).request for line in caplog.records]
    return [told for told in requests if told["status"] == status]


def test_who_has_all_of_its_answer_has_not_left(
    faked: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvlinker.doors.http.edge.access_log")
    fields = ENDLESS | {"max_tokens": 2, "stream": True}
    assert "[DONE]" in faked.post(CHAT, fields).text
    wait_until(lambda: f"POST {CHAT} 200 " in caplog.text)


@pytest.mark.parametrize("path", [CHAT, "/v1/context_caches/extract?name=a.txt"])
def test_a_client_that_leaves_while_sending_is_no_error(
    faked: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.INFO, "kvlinker.doors.http.edge.access_log")
    with asked(faked, path=path, missing=100):
        pass
    wait_until(lambda: _told_with(caplog, 499))
    assert {line.levelname for line in caplog.records} == {"INFO"}
    assert f"POST {path.partition('?')[0]} 499 " in caplog.text


def in_the_engine(served: Served) -> int:
    load = served.llm.current_load()
    return load.running + load.waiting


def test_explanations_take_no_threads_and_end_with_their_clients(served: Served) -> None:
    """The engine is held meanwhile; more clients wait than the server has threads."""
    engine = cast(EmbeddedEngine, served.llm.engine)
    fields = {"messages": ENDLESS["messages"]}
    with Held(engine):
        with ExitStack() as clients:
            for _ in range(WAITING):
                clients.enter_context(asked(served, path="/v1/link/explain", fields=fields))
            wait_until(lambda: in_the_engine(served) == WAITING)
            assert served.get("/status").status_code == 200
            assert served.post("/tokenize", {"prompt": "Hi"}).status_code == 200
        wait_until(lambda: len(engine.scheduler._cancelled) == WAITING)
    served.wait_until_idle()


def test_shutdown_frees_the_engine(faked: Served, engine: FakeEngine) -> None:
    engine.flowing.clear()
    with faked.http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the response ends with its iterator
        next(lines)
        engine.wait_until_running(2)
        faked.llm.close()
        engine.wait_until_idle()
