"""Fleets in processes of their own, as people start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.waiting import PATIENCE, wait_until

COMMAND = [sys.executable, "-c", "from kvlinker.cli import app; app()"]
START_SECONDS = 600.0
"""The longest wait for Ray, the model and its check, on a machine as busy as it may be."""

CACHES = "/v1/context_caches"
CHAT = "/v1/chat/completions"


def asked(*ids: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "context_cache", "id": each} for each in ids]
    content = [*parts, {"type": "text", "text": "Question: Where does Tom Reyes live?"}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }


@dataclass
class RunningFleet:
    """A fleet, and a client of it."""

    process: subprocess.Popen[Any]
    url: str
    http: httpx.Client
    log: list[str] = field(default_factory=list)

    def replicas(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self.http.get("/status").json()["replicas"]
        return told

    def ready(self) -> list[str]:
        """The addresses of those that are ready."""
        return [each["address"] for each in self.replicas() if each["state"] == "ready"]

    def processes(self) -> list[psutil.Process]:
        """All processes that were started for it, and its own."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def named(self, word: str) -> list[psutil.Process]:
        """Its processes that have a word in their command lines."""
        found = []
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if word in "".join(each.cmdline()):
                    found.append(each)
        return found

    def ingresses(self) -> list[psutil.Process]:
        return self.named("Ingress")

    def cache(self, *texts: str, **headers: str) -> list[str]:
        answer = self.http.post(CACHES, json={"chunks": list(texts)}, headers=headers)
        assert answer.status_code == 200, answer.text
        return [each["id"] for each in answer.json()["data"]]


@contextmanager
def started(
    state: Path, *arguments: str, environment: Mapping[str, str] = {}, **headers: str
) -> Iterator[RunningFleet]:
    command = [*COMMAND, "fleet", "--port", "0", "--state-dir", str(state), *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        try:
            url = next(filter(None, map(_address, _noted(process.stderr, lines))))
            threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True).start()
            with httpx.Client(base_url=url, timeout=PATIENCE, headers=headers) as http:
                fleet = RunningFleet(process, url, http, lines)
                wait_until(lambda: http.get("/health").status_code == 200, START_SECONDS)
                yield fleet
        except StopIteration:
            raise AssertionError("".join(lines)) from None
        finally:
            kill_all(process)
            state.with_name(f"{state.name}.log").write_text("".join(lines))


def _noted(output: Iterable[str], lines: list[str]) -> Iterator[str]:
    for line in output:
        lines.append(line)
        yield line


def _address(line: str) -> str | None:
    found = re.search(r"http://127\.0\.0\.1:\d+(?= \(OpenAI)", line)
    return found and found[0]


def kill_all(process: subprocess.Popen[Any]) -> None:
    """End whatever is left, without any chance to finish."""
    try:
        own = psutil.Process(process.pid)
        left = [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in left:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(PATIENCE)
