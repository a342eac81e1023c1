"""kvlinker router, as people start it: in processes of its own and its servers, one of which is
killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import PATIENCE, wait_until
from typer.testing import CliRunner

from kvlinker.base.errors import KVLinkerError
from kvlinker.cli import app

COMMAND = [sys.executable, "-c", "from kvlinker.cli import app; app()"]
CACHES = "/v1/context_caches"
CHAT = "/v1/chat/completions"


NO_BACKENDS: list[tuple[list[str], str]] = [
    (["ftp://host:1"], "ftp://host:1 is no address"),
    (["http://host:1/v1"], "is no address"),
    (["http://host:1?x=1"], "is no address"),
    (["http://host:1/#"], "is no address"),
    (["http://host:99999"], "is no address"),
    (["http://host:port"], "is no address"),
    (["http://[::1:8000"], "is no address"),
    (["http://:8000"], "is no address"),
    (["http://host:1", "http://host:1/"], "may be given once"),
    (["http://me:hush@host:1"], "takes no user and password"),
    (["http://host:1", "http://host:1"], "may be given once"),
    ([], "--backend"),
]


def test_backends_that_cannot_be(subtests: pytest.Subtests) -> None:
    for backends, message in NO_BACKENDS:
        with subtests.test(" ".join(backends)):
            arguments = [word for each in backends for word in ("--backend", each)]
            run = CliRunner().invoke(app, ["router", "--port", "0", *arguments])
            assert run.exit_code == 2
            assert message in " ".join(run.output.split())


@pytest.mark.parametrize("endpoint", ["tcp://host", "tcp://host:", "tcp://", "udp://host:1", ""])
def test_events_that_cannot_be_followed(endpoint: str) -> None:
    events = f"http://host:1={endpoint}"
    arguments = ["router", "--backend", "http://host:1", "--kv-events", events]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 2
    assert "write BACKEND=tcp://HOST:PORT" in " ".join(run.output.split())


def test_others_do_not_reach_it_without_keys() -> None:
    arguments = ["router", "--host", "0.0.0.0", "--backend", "http://host:1"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 2
    assert "binds to loopback only" in " ".join(run.output.split())


@pytest.mark.parametrize(
    ("options", "key"),
    [([], None), (["--admin-keys", "new,old"], "new"), (["--api-key", "own"], "own")],
)
def test_it_asks_servers_by_an_admins_key(
    options: Sequence[str], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def create_router(*_: object, api_key: str | None, **__: object) -> None:
        asked.append(api_key)
        raise KVLinkerError("This is enough.")

    monkeypatch.setattr("kvlinker_fleet.app.create_router", create_router)
    monkeypatch.delenv("KVLINKER_API_KEY", raising=False)
    arguments = ["router", "--port", "0", "--backend", "http://host:1", *options]
    CliRunner().invoke(app, arguments)
    assert asked == [key]


@contextmanager
def started(
    *arguments: str, environment: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a process that serves, and the process."""
    with subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            url = next(
                found[0]
                for line in process.stderr
                if (found := re.search(r"http://127\.0\.0\.1:\d+(?= |\n)", line))
            )
            threading.Thread(target=process.stderr.read, daemon=True).start()
            wait_until(lambda: answers(url))
            yield url, process
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.whole
def test_a_server_is_killed_in_the_middle_of_traffic(tmp_path: Path) -> None:
    """Requests without a first byte are answered by the other one, streams end with an event, ids
    stay good."""
    environment = os.environ | {
        "KVLINKER_STATE_DIR": str(tmp_path / "state"),
        "KVLINKER_THREADS": "1",
        "KVLINKER_HOST_MEMORY": "200MiB",
    }
    with (
        started("serve", environment=environment) as (one, killed),
        started("serve", environment=environment) as (other, _),
        started("router", "--backend", one, "--backend", other, environment=environment) as (
            url,
            router,
        ),
    ):
        ids = cached(url)
        outcomes: Counter[str] = Counter()
        enough = threading.Event()
        clients = [
            threading.Thread(target=ask, args=(url, ids, seed, outcomes, enough))
            for seed in range(3)
        ]
        for client in clients:
            client.start()
        wait_until(lambda: outcomes["answered"] >= 20 and outcomes["streamed"] >= 20)
        killed.send_signal(signal.SIGKILL)
        before = outcomes.total()
        wait_until(lambda: outcomes.total() >= before + 40)
        enough.set()
        for client in clients:
            client.join(PATIENCE)
        assert outcomes.keys() <= {"answered", "streamed", "told"}, outcomes
        assert outcomes["told"] <= 3, "only what was under way"
        status = httpx.get(f"{url}/status").json()["replicas"]
        assert {each["address"]: each["state"] for each in status} == {one: "dead", other: "ready"}
        for each in ids:
            assert httpx.get(f"{url}{CACHES}/{each}").status_code == 200
        router.send_signal(signal.SIGTERM)
        assert router.wait(PATIENCE) == 0


def cached(url: str) -> list[str]:
    texts = [f"Document {n} says that the code of door {n} is {n * 7919}. " * 8 for n in range(8)]
    made = httpx.post(f"{url}{CACHES}", json={"chunks": texts}, timeout=PATIENCE).json()
    return [each["id"] for each in made["data"]]


def ask(
    url: str, ids: Sequence[str], seed: int, outcomes: Counter[str], enough: threading.Event
) -> None:
    """Ask until it is enough, and count what became of it."""
    chance = random.Random(seed)
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        while not enough.is_set():
            parts = [{"type": "context_cache", "id": each} for each in chance.sample(ids, 3)]
            question: dict[str, Any] = {
                "messages": [
                    {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
                ],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
            }
            if chance.random() < 0.5:
                answer = client.post(CHAT, json=question)
                outcomes["answered" if answer.status_code == 200 else answer.text] += 1
                continue
            with client.stream("POST", CHAT, json=question | {"stream": True}) as stream:
                lines = [line for line in stream.iter_lines() if line]
            lost = any('"replica_lost"' in line for line in lines)
            ended = bool(lines) and lines[-1] == "data: [DONE]"
            outcomes["cut" if not ended else "told" if lost else "streamed"] += 1
