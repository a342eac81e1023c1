"""Serves prompts by simulated replicas, event by event, some of which end or join."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlinker.quality.bench.harness.report import Row
from kvlinker_lab.fleet.replicas import Costs, Fleet
from kvlinker_lab.fleet.rules import Rule

WARM_SHARE = 0.5
"""The share of all requests that fill the replicas' memory, and are not counted."""

EVENT_SHARE = 0.7
"""The share of all requests before replicas end or join."""

AFTER_SECONDS = 10.0
"""How long after that the requests are counted apart."""

PRELOAD_SECONDS = 30.0
"""How long a replica that joins may bring chunks to memory."""


@dataclass(frozen=True, slots=True)
class Event:
    """A share of the replicas ends, or joins with empty memories; ``preloads``: it brings the
    hottest chunks there first."""

    kind: str = "none"
    share: float = 0.25
    preloads: bool = False

    def choose_replicas(self, size: int, seed: int) -> list[int]:
        """Return which replicas end, or join: at least one of ``size`` stays."""
        if self.kind == "none":
            return []
        order = np.random.default_rng(seed).permutation(size)
        return [int(each) for each in order[: min(round(self.share * size), size - 1)]]


@dataclass(slots=True)
class Request:
    """One request, and what became of it. Times are in seconds."""

    chunks: Sequence[int]
    arrived: float
    sent: float = 0.0
    replica: int = 0
    tries: int = 0
    computed: int = 0
    loaded: int = 0

    first_byte: float | None = None
    """How long after its arrival it had its first byte."""

    cut: bool = False
    """True if its replica ended before its last byte."""


class Simulation:
    """Serves prompts, each replica one after another; answers that have begun go on beside."""

    def __init__(
        self, fleet: Fleet, rule: Rule, costs: Costs, *, event: Event, report_seconds: float
    ) -> None:
        self._fleet = fleet
        self._rule = rule
        self._costs = costs
        self._event = event
        self._report_seconds = report_seconds
        self._changing: Sequence[int] = ()
        self.requests: list[Request] = []
        self._steps: list[tuple[float, int, int]] = []  # when, which request, which of its tries
        self._joins: list[tuple[float, int]] = []

    def run(
        self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], seed: int = 0
    ) -> Row:
        """Serve all prompts; returns what became of those behind the warm-up."""
        self._changing = self._event.choose_replicas(len(self._fleet.replicas), seed)
        if self._event.kind == "join":
            for number in self._changing:
                self._set_alive(number, False)
        turn = int(len(prompts) * EVENT_SHARE)
        reported = 0.0
        for index, (chunks, now) in enumerate(zip(prompts, arrivals, strict=True)):
            self._until(now)
            if index == turn:
                self._change(now)
            if now - reported >= self._report_seconds:
                reported = now
                self._rule.report()
            self.requests.append(Request(chunks, now))
            self._send(index, now)
        copies = self._fleet.copies()
        self._until(np.inf)
        first = int(len(prompts) * WARM_SHARE)
        return {**self._row(first, arrivals[turn]), "copies": copies}

    def _until(self, now: float) -> None:
        """Let requests go on, and replicas join, up to this time."""
        while self._joins and self._joins[0][0] <= now:
            self._set_alive(heapq.heappop(self._joins)[1], True)
        while self._steps and self._steps[0][0] <= now:
            at, index, tries = heapq.heappop(self._steps)
            request = self.requests[index]
            if request.tries != tries or request.cut:
                continue  # its replica has ended meanwhile
            if request.first_byte is None:
                request.first_byte = at - request.arrived
                self._fleet.waiting[request.replica] -= 1
                self._fleet.replicas[request.replica].answering += 1
                self._rule.note_first_byte(index, at - request.sent)
                heapq.heappush(self._steps, (at + self._costs.answer, index, tries))
            else:
                self._fleet.replicas[request.replica].answering -= 1
                self._rule.note_end(index)

    def _send(self, index: int, now: float) -> None:
        request = self.requests[index]
        number = self._rule.choose(index, request.chunks, now)
        replica = self._fleet.replicas[number]
        request.replica, request.sent = number, now
        request.tries += 1
        request.computed, request.loaded = replica.use(request.chunks)
        service = self._costs.link + request.computed * self._costs.chunk
        service += request.loaded * min(self._costs.load, self._costs.chunk)
        service *= 1 + self._costs.busy * replica.answering
        replica.free_at = max(replica.free_at, now) + service
        self._fleet.waiting[number] += 1
        heapq.heappush(self._steps, (replica.free_at, index, request.tries))

    def _change(self, now: float) -> None:
        """End replicas, or add them."""
        if self._event.kind == "join":
            for number in self._changing:
                replica = self._fleet.replicas[number]
                most = min(replica.room, int(PRELOAD_SECONDS / max(self._costs.chunk, 1e-9)))
                hottest = self._rule.hottest(most) if self._event.preloads else []
                replica.use(reversed(hottest))
                heapq.heappush(self._joins, (now + len(hottest) * self._costs.chunk, number))
            self._until(now)
        elif self._event.kind == "death":
            for number in self._changing:
                self._set_alive(number, False)
                self._fleet.replicas[number].lose()
                self._fleet.replicas[number].free_at = now
                self._fleet.waiting[number] = 0
            ending = set(self._changing)
            under_way = [
                index
                for _, index, tries in sorted(self._steps)
                if self.requests[index].replica in ending and self.requests[index].tries == tries
            ]
            for index in under_way:
                self._rule.note_end(index)
                if self.requests[index].first_byte is None:
                    self._send(index, now)
                else:
                    self.requests[index].cut = True

    def _set_alive(self, number: int, alive: bool) -> None:
        self._fleet.alive[number] = alive
        self._rule.set_alive(number, alive)

    def _row(self, first: int, changed: float) -> dict[str, Any]:
        counted = self.requests[first:]
        span = counted[-1].arrived - counted[0].arrived
        row: dict[str, Any] = {
            **_figures(counted),
            "computed_per_s": sum(each.computed for each in counted) / span,
            "lost": sum(each.first_byte is None for each in counted),
            "cut": sum(each.cut for each in counted),
        }
        if self._event.kind != "none":
            after = [each for each in counted if 0 <= each.arrived - changed < AFTER_SECONDS]
            row |= {f"{name}_after": value for name, value in _figures(after).items()}
        return row


def _figures(requests: Sequence[Request]) -> Row:
    wanted = sum(len(each.chunks) for each in requests)
    loaded = sum(each.loaded for each in requests)
    missing = loaded + sum(each.computed for each in requests)
    times = [each.first_byte for each in requests if each.first_byte is not None]
    return {
        "resident_percent": 100 * (1 - missing / wanted),
        "loaded_percent": 100 * loaded / wanted,
        "ttft_p50_ms": 1e3 * float(np.quantile(times, 0.5)),
        "ttft_p99_ms": 1e3 * float(np.quantile(times, 0.99)),
    }
