"""``kvlinker serve`` is told to stop by signals, as by an orchestrator or at a terminal: in a
process of its own, with the model in the box."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.whole

WAIT = 60.0
STORY = "Tell a story."
"""What the model in the box answers, greedily, without end."""
CREATION = "/v1/context_caches"
USERS = 8


def bodies(tokens: int) -> dict[str, dict[str, Any]]:
    """A request of each dialect, whose answer has this many tokens."""
    messages = [{"role": "user", "content": STORY}]
    return {
        "/v1/chat/completions": {
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        "/v1/completions": {
            "prompt": STORY,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        "/v1/messages": {"messages": messages, "max_tokens": tokens, "temperature": 0},
        "/v1/responses": {"input": STORY, "max_output_tokens": tokens, "temperature": 0},
    }


@dataclass(frozen=True)
class Running:
    """A server that runs in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def running(self) -> int:
        """The number of requests for answers that the engine has."""
        counts = httpx.get(f"{self.url}/status", timeout=WAIT).json()["requests"]
        return int(counts["running"] + counts["waiting"])

    def wait_for(self, said: str) -> None:
        """Wait until the log has this text."""
        deadline = time.monotonic() + WAIT
        while said not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ended(self, status: int = 0) -> str:
        """What the server has logged when it has ended with this status."""
        assert self.process.wait(WAIT) == status, self.log.read_text()
        said = self.log.read_text()
        assert "Traceback" not in said
        assert " ERROR " not in said
        return said


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Running]:
    """A server whose state lies in ``folder``."""
    log = folder / "log"
    arguments = [
        "serve",
        "--port=0",
        f"--state-dir={folder / 'state'}",
        "--policy=naive",
        "--threads=1",
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from kvlinker.cli import app; app()", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + WAIT
        while not (found := re.search(r"address\s+(http://[\d.:]+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert httpx.get(f"{found[1]}/health", timeout=WAIT).status_code == 200
        yield Running(process, found[1], log)
    finally:
        process.kill()
        process.wait(WAIT)


def all_asked(
    server: Running, threads: ThreadPoolExecutor, tokens: int
) -> dict[tuple[str, bool], Future[Any]]:
    """Status and text of a request of each dialect, streamed (True) and not, all of which the
    engine has."""
    begun = threading.Semaphore(0)

    def ask(path: str, body: dict[str, Any]) -> tuple[int, str]:
        with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=WAIT) as answer:
            begun.release()
            return answer.status_code, answer.read().decode()

    answers = {
        (path, stream): threads.submit(ask, path, body | {"stream": stream})
        for path, body in bodies(tokens).items()
        for stream in (False, True)
    }
    for _ in range(len(answers) // 2):
        assert begun.acquire(timeout=WAIT), "a stream does not begin"
    while server.running() < len(answers) and not any(answer.done() for answer in answers.values()):
        time.sleep(0.01)
    return answers


def test_all_that_runs_is_finished_and_written(tmp_path: Path) -> None:
    """Answers of all dialects, and the creation of context caches, which the next server finds."""
    texts = [f"Chunk {number}. " + "The kettle stands in the kitchen. " * 40 for number in range(8)]
    with serving(tmp_path) as server, ThreadPoolExecutor(16) as threads:
        answers = all_asked(server, threads, 300)
        created = threads.submit(
            httpx.post, f"{server.url}{CREATION}", json={"chunks": texts}, timeout=WAIT
        )
        while server.running() <= len(answers) and not created.done():
            time.sleep(0.01)
        server.stop()
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert httpx.get(f"{server.url}/live").status_code == 200
        for path, body in bodies(1).items():
            refused = httpx.post(f"{server.url}{path}", json=body)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) > 0
        for (path, stream), answer in answers.items():
            status, text = answer.result(WAIT)
            assert status == 200, (path, stream, text)
            assert re.search(LAST[path, stream], text), (path, stream, text[-500:])
        assert created.result(WAIT).status_code == 200
        assert "requests were finished, 0 were cut off." in server.ended()
    files = list((tmp_path / "state" / "chunks").glob("??/*.safetensors"))
    assert len(files) == len(texts)
    ids = [cache["id"] for cache in created.result().json()["data"]]
    with serving(tmp_path) as server:
        for cache_id, text in zip(ids, texts, strict=True):
            assert httpx.get(f"{server.url}{CREATION}/{cache_id}/content").json()["text"] == text
        server.stop()
        server.ended()


LAST = {
    ("/v1/chat/completions", False): '"completion_tokens":300',
    ("/v1/chat/completions", True): r'"finish_reason":"length".*\s+data: \[DONE\]\s+$',
    ("/v1/completions", False): '"completion_tokens":300',
    ("/v1/completions", True): r'"finish_reason":"length".*\s+data: \[DONE\]\s+$',
    ("/v1/messages", False): '"output_tokens":300',
    ("/v1/messages", True): r'"type":"message_stop"\}\s+$',
    ("/v1/responses", False): '"output_tokens":300',
    ("/v1/responses", True): r'"type":"response.incomplete".*\s+$',
}
"""What complete answers of 300 tokens end with, or tell, by dialect and whether they are
streams."""


def test_what_does_not_finish_in_time_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout=0.3") as server, ThreadPoolExecutor(8) as threads:
        answers = all_asked(server, threads, 3000)
        server.stop()
        for (path, stream), answer in answers.items():
            status, text = answer.result(WAIT)
            assert "shutting down" in text, (path, stream, text[-500:])
            assert status == (200 if stream else 503)
            if not stream:
                kind = json.loads(text)["error"]
                assert kind["type" if path == "/v1/messages" else "code"] in (
                    "engine_closed",
                    "overloaded_error",
                )
            else:
                assert text.endswith("data: [DONE]\n\n") is path.endswith("completions")
        assert "0 requests were finished, 8 were cut off." in server.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, number: int) -> None:
    with serving(tmp_path) as server, ThreadPoolExecutor(1) as threads:
        body = bodies(3000)["/v1/completions"]
        asked = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT)
        while not server.running():
            time.sleep(0.01)
        server.stop(number)
        server.wait_for("a second signal ends at once")
        began = time.monotonic()
        server.stop(number)
        server.ended(-number)
        assert time.monotonic() - began < 2
        assert isinstance(asked.exception(WAIT), httpx.TransportError)


def test_under_load_every_request_is_finished_or_refused(tmp_path: Path) -> None:
    """Users ask again and again, on kept connections and on new ones, until the port is closed."""
    ends: Counter[str] = Counter()
    body = bodies(20)["/v1/chat/completions"]
    stopped = threading.Event()

    def use(url: str, kept: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=1 if kept else 0)
        with httpx.Client(timeout=WAIT, limits=limits) as http:
            while True:
                try:
                    answer = http.post(f"{url}/v1/chat/completions", json=body)
                except httpx.TransportError:  # which the server has not seen
                    assert stopped.is_set()
                    return
                complete = (
                    answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 20
                )
                ends["complete" if complete else f"{answer.status_code}"] += 1

    with serving(tmp_path) as server, ThreadPoolExecutor(USERS) as threads:
        users = [threads.submit(use, server.url, bool(number % 2)) for number in range(USERS)]
        while ends["complete"] < 2 * USERS:
            time.sleep(0.01)
        stopped.set()
        server.stop()
        for user in users:
            user.result(WAIT)
        said = server.ended()
    assert "0 were cut off" in said
    assert ends["complete"] == said.count(" POST /v1/chat/completions 200 ")
    assert ends["503"] == said.count(" POST - 503 ")
    assert ends.keys() == {"complete", "503"}
