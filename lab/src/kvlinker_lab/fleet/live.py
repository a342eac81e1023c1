"""Asks real servers on this machine, and counts how many chunks were in memory where they were
wanted: behind ``kvlinker router``, and sent as other rules would send them."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings
from kvlinker_lab.fleet.replicas import Costs, Fleet
from kvlinker_lab.fleet.rules import Rule
from kvlinker_lab.fleet.traffic import prompts
from kvlinker_lab.load.endpoint import ServerFailedError
from kvlinker_lab.load.servers import COMMAND, kvlinker_server

FORMS = ("documents", "plain")
"""Chunks as documents of their own, or joined into one text that servers recognise."""

ROOM = 48
"""The chunks of which the memory of each server has room."""

WORDS = 120
"""The words of a chunk."""

WARM_SHARE = 0.5
"""The share of requests that fill the servers' memory, and are not counted."""

USERS = 4
"""The requests at a time."""

ANSWER_SECONDS = 300.0
"""The longest wait for an answer of a server, in seconds. Chosen by hand."""

_COSTS = Costs(link=1.0, chunk=1.0)
"""The costs for rules that reckon in seconds. Live runs compare no times, so both are 1."""

_POLL_SECONDS = 0.1
"""The seconds between two looks whether the router knows its servers."""

_ADDRESS = re.compile(r"at (http://[\d.:]+)")
_WORDS = """baker pilot teacher lives works in the she he city of Oslo Varna Lisbon company builds
sells engines paper bread maps and boats from north to south every year""".split()  # noqa: SIM905


class _Target:
    """The target of requests: servers, chosen by a rule that learns of requests and answers, or one
    router before the servers."""

    def __init__(self, urls: Sequence[str], rule: Rule | None) -> None:
        self._urls = urls
        self._rule = rule
        self._lock = threading.Lock()
        self._sent = 0

    @contextmanager
    def next(self, chunks: Sequence[int]) -> Iterator[str]:
        """Give the address for one request, which is under way in this context."""
        if self._rule is None:
            yield self._urls[0]
            return
        with self._lock:
            request, began = self._sent, time.monotonic()
            self._sent += 1
            number = self._rule.choose(request, chunks, began)
            self._rule.fleet.waiting[number] += 1
        try:
            yield self._urls[number]
        finally:
            with self._lock:
                self._rule.fleet.waiting[number] -= 1
                self._rule.note_first_byte(request, time.monotonic() - began)
                self._rule.note_end(request)


def run_live(
    settings: Settings,
    size: int,
    rules: Mapping[str, Callable[[Fleet, Costs, int], Rule]],
    *,
    form: str,
    requests: int,
    seed: int,
    order: str = "retrieved",
    progress: Progress = silent,
) -> list[Row]:
    """Ask ``size`` new servers for each rule the same, ``requests`` times their number; returns
    what they counted behind the warm-up. The rule ``resident`` is ``kvlinker router`` itself."""
    texts = [_text(number, seed) for number in range(size * ROOM)]
    asked = list(prompts(len(texts), size * requests, seed, order=order))
    first = int(len(asked) * WARM_SHARE)
    chunk_bytes = _chunk_bytes(settings, texts[:8])
    rows: list[Row] = []
    for name, make in rules.items():
        progress(f"{size} servers, {name}, {form}")
        with ExitStack() as stack:
            servers = [
                stack.enter_context(_server(settings, form, chunk_bytes)) for _ in range(size)
            ]
            if name == "resident":
                target = _Target([stack.enter_context(_router(servers))], None)
            else:
                target = _Target(servers, make(Fleet(size, ROOM), _COSTS, seed))
            client = stack.enter_context(httpx.Client(timeout=ANSWER_SECONDS))
            pool = stack.enter_context(ThreadPoolExecutor(USERS))
            ask = partial(_ask, client, target, texts, form)
            list(pool.map(ask, asked[:first]))
            before = _lookups(client, servers)
            shares, times = zip(*pool.map(ask, asked[first:]), strict=True)
            found = {key: n - before.get(key, 0) for key, n in _lookups(client, servers).items()}
        wanted = sum(found.values())
        rows.append(
            {
                "case": name,
                "replicas": size,
                "form": form,
                "resident_percent": 100 * found.get("hit", 0) / max(wanted, 1),
                "ttft_p50_ms": 1e3 * float(np.quantile(times, 0.5)),
                "ttft_p99_ms": 1e3 * float(np.quantile(times, 0.99)),
                "lookups": wanted,
                "computed_chunks": found.get("miss", 0),
                "cached_percent": 100 * sum(shares) / len(shares),
            }
        )
    return rows


@contextmanager
def _server(settings: Settings, form: str, chunk_bytes: int) -> Iterator[str]:
    """Start a server with a memory of ``ROOM`` chunks and no disk."""
    options: dict[str, Any] = {
        "host_memory": (ROOM + 1) * chunk_bytes,
        "disk_space": 0,
        "implicit": "auto" if form == "plain" else "marked",
        "implicit_caches": 100_000,
        "prefix_cache": "off",
    }
    with kvlinker_server(settings, **options) as server:
        yield server.url


def _chunk_bytes(settings: Settings, texts: Sequence[str]) -> int:
    """Return the bytes that a chunk takes in a server's memory."""
    with kvlinker_server(settings, disk_space=0) as server:
        httpx.post(
            f"{server.url}/v1/context_caches", json={"chunks": texts}, timeout=ANSWER_SECONDS
        ).raise_for_status()
        memory = httpx.get(f"{server.url}/status").json()["tiers"][0]
        return int(memory["used_bytes"]) // len(texts)


@contextmanager
def _router(servers: Sequence[str]) -> Iterator[str]:
    """Start ``kvlinker router`` before these servers, and wait until it knows their chunks."""
    command = [*COMMAND, "router", "--port", "0"]
    for url in servers:
        command += ["--backend", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, map(_ADDRESS.search, process.stderr)), None)
            if found is None:
                raise ServerFailedError("kvlinker router did not start.")
            reader = threading.Thread(target=process.stderr.read, daemon=True)
            reader.start()  # so that what it logs does not fill the pipe
            deadline = time.monotonic() + ANSWER_SECONDS
            while not all(
                replica["epoch"] for replica in httpx.get(f"{found[1]}/status").json()["replicas"]
            ):
                if time.monotonic() > deadline:
                    raise ServerFailedError("kvlinker router does not know what its servers have.")
                time.sleep(_POLL_SECONDS)
            yield found[1]
        finally:
            process.terminate()


def _text(number: int, seed: int) -> str:
    """Return a text of its own, in lines of ten words."""
    chance = random.Random(f"{seed} {number}")
    words = [chance.choice(_WORDS) for _ in range(WORDS)]
    lines = [" ".join(words[at : at + 10]) for at in range(0, WORDS, 10)]
    return f"Chapter {number}.\n" + "\n".join(lines) + "\n"


def _ask(
    client: httpx.Client, target: _Target, texts: Sequence[str], form: str, chunks: Sequence[int]
) -> tuple[float, float]:
    """Ask about chunks; returns the share of the prompt's tokens that were cached, and the seconds
    until the answer's one token."""
    question = "Who works there?"
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    given = [texts[chunk] for chunk in chunks]
    if form == "documents":
        body["documents"] = [{"text": text} for text in given]
        body["messages"] = [{"role": "user", "content": question}]
    else:
        content = "\n\n".join([*given, question])
        body["messages"] = [{"role": "user", "content": content}]
    began = time.monotonic()
    with target.next(chunks) as url:
        answer = client.post(f"{url}/v1/chat/completions", json=body)
    seconds = time.monotonic() - began
    answer.raise_for_status()
    usage = answer.json()["usage"]
    share: float = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    return share, seconds


def _lookups(client: httpx.Client, servers: Sequence[str]) -> dict[str, int]:
    """Return how often chunks were found in memory, and were not, on all servers together."""
    found: dict[str, int] = {}
    for url in servers:
        for family in text_string_to_metric_families(client.get(f"{url}/metrics").text):
            for sample in family.samples:
                if sample.name == "kvlinker:chunk_lookups_total":
                    result = sample.labels["result"]
                    found[result] = found.get(result, 0) + int(sample.value)
    return found
