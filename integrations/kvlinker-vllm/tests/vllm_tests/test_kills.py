"""Linked requests under everything that may happen to them at once: aborts, deletions, and kills of
vLLM's engine."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("vllm")

from tests.programs import README_CLIENT, README_URL, output_of
from tests.waiting import wait_until

from vllm_tests.conftest import OPTIONS

logger = logging.getLogger(__name__)

REQUESTS = int(os.environ.get("KVLINKER_TEST_REQUESTS", "60"))
KILLS = int(os.environ.get("KVLINKER_TEST_KILLS", "1"))
USERS = 8
CACHES = 12
POLICIES = ("naive", "legolink-4", "query-10", "cacheblend-40-onestep", "h2o-20", "full")
TEXTS = (
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
)
ABORTED_STREAM, ABORTED_ANSWER, PLAIN = 0, 3, 5
"""Of every seven requests, the one that is left after its first event, before its answer, or has no
context cache."""

SECONDS = 600
"""The seconds after which a request counts as one that hangs; starting vLLM takes some of them."""

START = (
    "from importlib import import_module; import_module('kvlinker.cli.serve').LEAST_SECONDS = 0.0; "
    "import_module('kvlinker.cli').app()"
)


@contextmanager
def restarting_server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """``kvlinker serve`` with the model in the box, which starts vLLM again however soon it has
    failed: its URL and process."""
    arguments = ["serve", "--port", "0", "--engine", "vllm", "--state-dir", str(folder / "state")]
    arguments += [
        "--on-engine-failure",
        "restart",
        "--vllm-options",
        json.dumps(OPTIONS),
        "--max-waiting",
        "64",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", START, *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + SECONDS
            while not (found := re.search(r"address\s+(http://[\d.:]+)", log.read_text())):
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            while not is_up(found[1]):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield found[1], psutil.Process(server.pid)
        except BaseException:
            logger.exception("The server's log ends: %s", log.read_text()[-5000:])
            raise
        finally:
            server.terminate()
            server.wait(timeout=60)


def is_up(url: str) -> bool:
    """Whether the server answers: it tells its address before it listens."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def kill_engine(server: psutil.Process) -> None:
    for child in server.children(recursive=True):
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if any("EngineCore" in part for part in [child.name(), *child.cmdline()]):
                child.kill()


class Users:
    """``USERS`` clients that send requests one after another, one that deletes and creates context
    caches all the time, and one that kills vLLM's engine."""

    def __init__(self, url: str, server: psutil.Process) -> None:
        self.url = url
        self._server = server
        self.ends: Counter[str] = Counter()
        self._numbers = count()
        self.kept = [self._cached(0), self._cached(1)]
        self._ids = [self._cached(number) for number in range(CACHES)]
        self._over = threading.Event()
        self._begun = 0

    def run(self) -> None:
        with ThreadPoolExecutor(USERS + 2) as threads:
            others = [threads.submit(self._replace_caches), threads.submit(self._kill)]
            users = [threads.submit(self._use) for _ in range(USERS)]
            try:
                for user in users:
                    user.result()
            finally:
                self._over.set()
            for other in others:
                other.result()

    def _use(self) -> None:
        with httpx.Client(base_url=self.url, timeout=SECONDS) as http:
            while (number := next(self._numbers)) < REQUESTS:
                self._begun = number
                end = self._ask(http, number)
                self.ends[end] += 1
                if end.startswith("refused: 503"):  # failed, or being started again
                    wait_until_healthy(http)

    def _ask(self, http: httpx.Client, number: int) -> str:
        """How the request with this number ended. Raises httpx.TimeoutException for one that
        hangs."""
        kind = number % 7
        ids = [] if kind == PLAIN else [self._ids[number % CACHES], self._ids[number * 5 % CACHES]]
        body = question(ids, POLICIES[number % len(POLICIES)], n=1 + (number % 11 == 1))
        try:
            if kind == ABORTED_ANSWER:
                return self._abandon(body)
            if number % 2 and kind != ABORTED_STREAM:
                return ending(http.post("/v1/chat/completions", json=body))
            with http.stream(
                "POST", "/v1/chat/completions", json=body | {"stream": True}
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    return ending(answer)
                return last_event(answer, first_alone=kind == ABORTED_STREAM)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            return f"cut: {type(error).__name__}"

    def _abandon(self, body: dict[str, Any]) -> str:
        """Close the connection before there is an answer."""
        try:
            return ending(
                httpx.post(
                    f"{self.url}/v1/chat/completions",
                    json=body,
                    timeout=httpx.Timeout(SECONDS, read=0.05),
                )
            )
        except httpx.ReadTimeout:
            return "aborted"

    def _replace_caches(self) -> None:
        numbers = count(CACHES)
        while not self._over.wait(0.1):
            number = next(numbers)
            try:
                httpx.delete(
                    f"{self.url}/v1/context_caches/{self._ids[number % CACHES]}", timeout=SECONDS
                )
                self._ids[number % CACHES] = self._cached(number)
            except (httpx.TransportError, KeyError):
                continue  # vLLM is being started again

    def _cached(self, number: int) -> str:
        text = f"{number}: {TEXTS[number % 2]}" * (1 + number % 3)
        created = httpx.post(
            f"{self.url}/v1/context_caches", json={"chunks": [text]}, timeout=SECONDS
        ).json()
        found: str = created["data"][0]["id"]
        return found

    def _kill(self) -> None:
        for kill in range(1, KILLS + 1):
            while self._begun < kill * REQUESTS // (KILLS + 1):
                if self._over.wait(0.05):
                    return
            kill_engine(self._server)


def wait_until_healthy(http: httpx.Client) -> None:
    """Wait until vLLM has been started again, as clients that are refused may."""
    wait_until(lambda: http.get("/health").status_code == 200, SECONDS)


def question(ids: list[str], policy: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "context_cache", "id": each} for each in ids]
    content = [*parts, {"type": "text", "text": "Question: Where does Tom Reyes live?"}]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 16,
    }
    return body | {"ignore_eos": True, "link": {"policy": policy}} | fields


def ending(answer: httpx.Response) -> str:
    """How a request ended that was answered at once."""
    told = answer.json()
    if answer.status_code == 200:
        assert all(choice["finish_reason"] for choice in told["choices"])
        return "answered"
    return f"refused: {answer.status_code} {told['error']['code']}"


def last_event(answer: httpx.Response, *, first_alone: bool) -> str:
    """How a streamed answer ended; with ``first_alone`` the client leaves after the first event."""
    last = ""
    for line in answer.iter_lines():
        if not line.startswith("data: "):
            continue
        last = line.removeprefix("data: ")
        if first_alone:
            return "aborted"
    if last == "[DONE]":
        return "answered"
    error = json.loads(last or "{}").get("error")
    return "cut: stream" if error is None else f"refused: {error['code']}"


@pytest.mark.smoke
@pytest.mark.whole
def test_every_request_is_answered_or_refused_whatever_happens(tmp_path: Path) -> None:
    """And nothing is left of it: the engine that follows is idle in the end, and the client that
    the README shows gets what it shows."""
    program, shown = README_CLIENT
    with (
        restarting_server(tmp_path) as (url, server),
        httpx.Client(base_url=url, timeout=SECONDS) as http,
    ):
        users = Users(url, server)
        before = [answer_of(http, users.kept, policy) for policy in POLICIES]
        began = time.monotonic()
        users.run()
        logger.info(
            "%d requests took %.0f s: %s",
            REQUESTS,
            time.monotonic() - began,
            dict(sorted(users.ends.items())),
        )
        assert users.ends.total() == REQUESTS
        assert {end.partition(":")[0] for end in users.ends} <= {
            "answered",
            "aborted",
            "refused",
        }, users.ends
        assert users.ends["answered"] > REQUESTS // 5, users.ends
        assert (
            sum(users.ends[f"refused: {status}engine_closed"] for status in ("503 ", "")) >= KILLS
        )
        assert restarts(tmp_path / "log") == KILLS
        wait_until_healthy(http)
        assert [answer_of(http, users.kept, policy) for policy in POLICIES] == before
        assert output_of(program.replace(README_URL, url)) == shown
        load = http.get("/status").json()["requests"]
        assert (load["running"], load["waiting"]) == (0, 0)


def restarts(log: Path) -> int:
    """How often the server started vLLM again: the last time may still be to come when all requests
    have been refused."""
    deadline = time.monotonic() + SECONDS
    while (told := log.read_text().count("It is started again")) < KILLS:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return told


def answer_of(http: httpx.Client, ids: list[str], policy: str) -> str:
    answer = http.post("/v1/chat/completions", json=question(ids, policy))
    assert answer.status_code == 200, answer.text
    told: str = answer.json()["choices"][0]["message"]["content"]
    return told
