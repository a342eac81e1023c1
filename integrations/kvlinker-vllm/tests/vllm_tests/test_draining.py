"""A server on vLLM that is told to stop finishes what runs, and cuts off what takes too long."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("vllm")

from tests.doors.http.serving import Served
from tests.doors.http.test_draining import BODIES, WAIT, started

from kvlinker.doors.http.app import create_app

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("timeout", "tokens", "end"), [(WAIT, 100, "length"), (0.5, 1900, "engine_closed")]
)
def test_a_stream_is_finished_or_cut_off(
    served: Served, timeout: float, tokens: int, end: str
) -> None:
    app = create_app(served.llm, served.llm.settings.model_copy(update={"drain_timeout": timeout}))
    _, stopping = started(app, served.llm.engine)
    begun = threading.Event()

    def ask() -> str:
        body = BODIES[CHAT] | {"stream": True, "ignore_eos": True, "max_tokens": tokens}
        with httpx.stream("POST", f"{stopping.url}{CHAT}", json=body, timeout=WAIT) as answer:
            lines = answer.iter_lines()
            told = [next(lines)]
            begun.set()
            return "\n".join([*told, *lines])

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask)
        assert begun.wait(WAIT)
        stopping.drain.begin()
        assert (
            httpx.post(f"{stopping.url}{CHAT}", json=BODIES[CHAT], timeout=WAIT).status_code == 503
        )
        told = asked.result(WAIT)
    assert end in told
    assert told.rstrip().endswith("data: [DONE]")
    assert stopping.ended()
    served.wait_until_idle()
