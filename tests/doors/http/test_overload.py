"""Too much work is refused at once, and what is asked for together is refused together."""

from __future__ import annotations

import threading

from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_busy_server_answers_429(faked: Served, engine: FakeEngine) -> None:
    engine.flowing.clear()
    statuses = []

    def ask() -> None:
        statuses.append(faked.post(CHAT, {"messages": MESSAGES, "max_tokens": 1}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(engine.capacity)]
    for thread in threads:
        thread.start()
    engine.wait_until_running(engine.capacity)
    for stream in (False, True):
        refused = faked.post(CHAT, {"messages": MESSAGES, "stream": stream})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "7"
        assert refused.json()["error"] == {
            "message": "busy",
            "type": "overloaded_error",
            "param": None,
            "code": "overloaded",
        }
    engine.flowing.set()
    for thread in threads:
        thread.join()
    assert statuses == [200] * engine.capacity
    assert faked.post(CHAT, {"messages": MESSAGES, "max_tokens": 1}).status_code == 200


def test_choices_beyond_the_capacity_queue_none(faked: Served, engine: FakeEngine) -> None:
    engine.flowing.clear()
    assert faked.post(CHAT, {"messages": MESSAGES, "n": engine.capacity + 1}).status_code == 429
    assert engine.requests == []
    prompts = ["a"] * (engine.capacity + 1)
    assert faked.post("/v1/completions", {"prompt": prompts}).status_code == 429
    engine.wait_until_idle()
    assert engine.cancelled == engine.capacity


def test_unexpected_failure_says_nothing_of_the_inside(faked: Served, engine: FakeEngine) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("secret inside")

    engine.generate = explode  # type: ignore[assignment, method-assign]
    answer = faked.post(CHAT, {"messages": MESSAGES})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert faked.get("/health").status_code == 200
