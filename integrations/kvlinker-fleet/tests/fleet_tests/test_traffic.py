"""Two servers behind a router, in processes of their own, over PostgreSQL and Redis, with eight
clients that write, delete and ask, while each of these is killed."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, wait_until

from fleet_tests.processes import Processes, url
from fleet_tests.ray_serve.fleets import CACHES, CHAT, START_SECONDS, asked
from kvlinker.store import Catalog

pytestmark = pytest.mark.whole

CLIENTS = 8
QUOTA = 20
SOME = 5 * CLIENTS
"""The requests of each phase, at least."""

TEXTS = [
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
    "Ada Brandt lives in Porto. She works as a nurse.\n\n",
]
GONE = (503, "catalog_unavailable")
LOST = (503, "replica_lost")
FULL = (403, "quota_exceeded")


class Clients:
    """Clients that create context caches, delete them, and ask by ids and by texts; they count how
    that ended by what they did, with a status and an error's code, and keep all answers."""

    def __init__(self, router: str, ids: list[str]) -> None:
        self.ends: dict[str, Counter[tuple[int, str | None]]] = {}
        self.answers: set[tuple[str, int, str]] = set()
        self._router = router
        self._prompts = {
            "by ids": [asked(*order) for order in itertools.permutations(ids, 2)],
            "by texts": [by_texts(*order) for order in itertools.permutations(TEXTS, 2)],
        }
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def prompts(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        for kind, bodies in self._prompts.items():
            for number, body in enumerate(bodies):
                yield kind, number, body

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(self._work) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._enough.set()
                for each in running:
                    each.result()

    def go_on(self, more: int = SOME) -> None:
        """Wait until so many requests more have ended."""
        enough = self._ended() + more
        wait_until(lambda: self._ended() >= enough, START_SECONDS)

    def _ended(self) -> int:
        with self._lock:
            return sum(count.total() for count in self.ends.values())

    def _work(self) -> None:
        prompts = itertools.cycle(self.prompts())
        own: list[str] = []
        with httpx.Client(base_url=self._router, timeout=PATIENCE) as http:
            while not self._enough.is_set():
                body = {"chunks": [f"Text {next(self._numbers)}."]}
                made = self._note("create", http.post(CACHES, json=body))
                own += [each["id"] for each in made.get("data", ())]
                for kind, number, prompt in itertools.islice(prompts, 2):
                    told = self._note(kind, http.post(CHAT, json=prompt))
                    if "choices" in told:
                        self.answers.add((kind, number, answer_of(told)))
                if len(own) > 2:
                    self._note("delete", http.delete(f"{CACHES}/{own.pop(0)}"))

    def _note(self, kind: str, answer: httpx.Response) -> dict[str, Any]:
        told: dict[str, Any] = answer.json()
        if answer.status_code == 503:
            assert answer.headers["Retry-After"]
        with self._lock:
            ends = self.ends.setdefault(kind, Counter())
            ends[answer.status_code, told.get("error", {}).get("code")] += 1
        return told


def by_texts(*texts: str) -> dict[str, Any]:
    """A prompt whose answer is that of the model's own computation, with or without a catalog."""
    return asked(documents=[{"text": each} for each in texts], link={"policy": "full"})


def answer_of(told: dict[str, Any]) -> str:
    content: str = told["choices"][0]["message"]["content"]
    return content


def usage(server: httpx.Client) -> dict[str, Any]:
    told: dict[str, Any] = server.get(f"{CACHES}/usage").json()
    return {name: told[name] for name in ("caches", "chunks", "tokens", "pinned_bytes")}


def test_whatever_is_killed_answers_stay_and_sums_are_equal(
    tmp_path: Path, frail_redis: RedisServer
) -> None:
    postgres = PostgresServer()
    processes = Processes(tmp_path, postgres, frail_redis)
    options = ("--dtype", "float32", "--tenant-quota-caches", str(QUOTA))
    try:
        one, _ = processes.start(*options)
        other, process = processes.start(*options)
        backends = ("--backend", url(one), "--backend", url(other))
        router, _ = processes.start(*backends, command="router")
        made = router.post(CACHES, json={"chunks": TEXTS})
        clients = Clients(url(router), [each["id"] for each in made.json()["data"]])
        alone = {
            (kind, number, answer_of(one.post(CHAT, json=body).json()))
            for kind, number, body in clients.prompts()
        }
        with clients.at_work():
            clients.go_on()
            frail_redis.kill()
            clients.go_on()
            frail_redis.start()
            postgres.kill()
            wait_until(lambda: clients.ends["by ids"][GONE], START_SECONDS)
            clients.go_on()
            postgres.start()
            wait_until(lambda: one.get(CACHES).status_code == 200, START_SECONDS)
            clients.go_on()
            process.send_signal(signal.SIGKILL)
            clients.go_on()
            processes.start(*options, port=other.base_url.port)
            clients.go_on()
        assert clients.answers == alone, "each prompt has the one answer that one server gives"
        done = {kind: set(ends) for kind, ends in clients.ends.items()}
        assert done["by texts"] == {(200, None)}
        assert done["by ids"] == {(200, None), GONE}
        assert {(200, None), FULL, GONE} <= done["create"] <= {(200, None), FULL, GONE, LOST}
        assert {(200, None)} <= done["delete"] <= {(200, None), GONE, LOST}
        assert usage(one) == usage(other)
        assert len(TEXTS) <= usage(one)["caches"] <= QUOTA
        processes.close()
        catalog = Catalog(processes.catalog_url)
        assert catalog.check() == ()
        catalog.close()
    finally:
        processes.close()
        postgres.remove()
