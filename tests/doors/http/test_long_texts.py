"""Long texts are refused early, and hold up nobody while they are encoded."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvlinker.doors.http.models import LONG_AT_ONCE, LONG_TEXT_BYTES
from kvlinker.prompting.encoding import TextEncoder
from tests.doors.http.serving import Served

LONG = "word and other " * 700_000
"""A text of 10 MB."""

USER = {"role": "user", "content": "a"}
AUTO = {"link": {"implicit": "auto"}}


def marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def described(text: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": text}}


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a", "name": LONG}]},
        "messages",
    ),
    ("/v1/chat/completions", {"messages": [USER], "documents": [{"text": LONG}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [USER], "documents": [{"text": LONG[:60_000]}] * 100},
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [marked(LONG)]}]},
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [marked(LONG[:60_000])] * 100}]},
        "messages",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], **AUTO}, "messages"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [described(LONG)]}, "tools"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [described(LONG)], **AUTO}, "tools"),
    ("/v1/completions", {"prompt": [marked(LONG[:60_000])] * 100}, "prompt"),
    ("/v1/completions", {"prompt": LONG, **AUTO}, "prompt"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt.1"),
    ("/v1/completions", {"prompt": [5] * 500_000}, "prompt"),
    ("/v1/link/explain", {"prompt": LONG}, "prompt"),
    ("/v1/context_caches", {"chunks": ["a", LONG]}, "chunks.1"),
    ("/tokenize", {"text": LONG}, "text"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/tokenize", {"messages": [USER], "documents": [{"text": LONG}]}, "messages"),
]


@pytest.mark.whole
def test_what_cannot_fit_is_refused_without_being_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    encoded: list[int] = []
    for name in ("encode_data", "encode_prompt", "count_roughly"):
        original = getattr(TextEncoder, name)

        def noting(
            self: TextEncoder, text: str, *, original: Any = original, **options: Any
        ) -> Any:
            encoded.append(len(text))
            return original(self, text, **options)

        monkeypatch.setattr(TextEncoder, name, noting)
    for path, body, param in BODIES:
        with subtests.test(path, body=body):
            encoded.clear()
            answer = served.post(path, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                400,
                "context_length_exceeded",
                param,
            )
            assert f"{served.llm.max_model_len:,}" in error["message"]
            assert max(encoded, default=0) < 100


class Gate:
    """Lets texts with a marker wait in the tokenizer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self._waiting = threading.Condition()
        self._count = 0
        original = TextEncoder.encode_data

        def gated(encoder: TextEncoder, text: str, **options: Any) -> tuple[int, ...]:
            if text.startswith("wait"):
                with self._waiting:
                    self._count += 1
                    self._waiting.notify_all()
                assert self.open.wait(20)
            return original(encoder, text, **options)

        monkeypatch.setattr(TextEncoder, "encode_data", gated)

    def wait_for(self, count: int) -> None:
        with self._waiting:
            assert self._waiting.wait_for(lambda: self._count >= count, 10)

    @property
    def count(self) -> int:
        return self._count


def test_long_texts_wait_for_each_other_and_nobody_for_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    body = b'{"text": "wait"' + b" " * LONG_TEXT_BYTES + b"}"
    asked: list[Future[Any]] = []
    with ThreadPoolExecutor(50) as clients:
        try:
            asked = [
                clients.submit(
                    served.http.post,
                    "/tokenize",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
                for _ in range(45)
            ]
            gate.wait_for(LONG_AT_ONCE)
            assert served.get("/health").status_code == 200
            assert served.get("/status").status_code == 200, (
                "the threads that all routes share are free"
            )
            assert served.post("/tokenize", {"text": "short"}).status_code == 200
            assert (
                served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            )
            assert gate.count == LONG_AT_ONCE
        finally:
            gate.open.set()
        assert {answer.result().status_code for answer in asked} == {200}


def test_the_tokenizer_gives_up_the_lock(served: Served) -> None:
    """``Tokenizer.encode`` keeps it: nothing on the way of a request may call that."""
    encoder = served.llm.builder.encoder
    text = "word and other " * 70_000
    ticks = 0
    done = threading.Event()

    def encode() -> None:
        encoder.encode_data(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.01):
        ticks += 1
    thread.join()
    assert ticks > 5


def test_tokenize_counts_more_than_the_window(served: Served) -> None:
    told = served.post("/tokenize", {"text": "word " * served.llm.max_model_len}).json()
    assert told["count"] == len(told["tokens"]) > told["max_model_len"]
