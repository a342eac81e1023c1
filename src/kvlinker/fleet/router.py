"""Chooses the replica for a request: the one with the least expected wait plus the time to compute
what it does not have."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvlinker.base.types.residency import ResidencyReport
from kvlinker.fleet.naming import PromptOutline
from kvlinker.fleet.replicas import NameBook, Replica

MISS_WEIGHT = 2.5
"""How much a second of computing a missing chunk counts against a second of waiting: what is
computed elsewhere is computed again and again, and takes the place of other chunks."""

MOST_WAIT_SECONDS = 60.0
"""Longer waits are not told apart: in such an overload, residency decides."""

FIRST_SECONDS = 0.05
"""The expected time of a request of others until some were measured."""

SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why. ``expected``: seconds of computing its prompt there."""

    request: int
    replica: str
    resident: int
    chunks: int
    expected: float

    @property
    def reason(self) -> str:
        """What the access log says."""
        return f"{self.replica}: {self.resident} of {self.chunks} chunks"


class Router:
    """Keeps the view of all replicas, and decides. Belongs to one thread, or one event loop. Times
    are in seconds of one monotonic clock."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._replicas: dict[str, Replica] = {}
        self._names = NameBook()
        self._requests = 0
        self._seconds = FIRST_SECONDS
        self._random = random.Random(seed)

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """All replicas, by id."""
        return self._replicas

    def add(self, replica: str) -> None:
        """Know a replica, which is not ready until a report or ``set_ready`` says so."""
        self._replicas.setdefault(replica, Replica(replica))

    def set_ready(self, replica: str, ready: bool) -> None:
        """Send requests to a replica, or none. One that is not ready may have lost everything."""
        self._replicas[replica].ready = ready

    def report(
        self,
        replica: str,
        report: ResidencyReport,
        *,
        running: int,
        waiting: int,
        seconds_per_token: float | None,
    ) -> bool:
        """Take a replica's report. Returns False where it does not follow the last one, so that the
        whole has to be asked for; what was known stays until then."""
        view = self._replicas[replica]
        if not report.whole and report.epoch != view.epoch:
            return False
        if report.epoch != view.epoch:
            view.forget()
        if report.whole:
            view.resident.clear()
        view.resident -= set(report.gone)
        view.resident |= report.resident.keys()
        view.epoch, view.number = report.epoch, report.number
        view.running, view.waiting = running, waiting
        view.reported_open = view.open
        if seconds_per_token is not None:
            view.seconds_per_token = seconds_per_token
        self._names.learn(report.resident)
        return True

    def choose(
        self, prompt: PromptOutline, now: float, *, without: Collection[str] = ()
    ) -> Decision | None:
        """Decide where a request goes that is sent now, but to none of ``without``; None where no
        replica is ready."""
        ready = [each for each in self._replicas.values() if each.ready and each.id not in without]
        if not ready:
            return None
        costs = []
        for view in ready:
            missing, resident = self._missing(view, prompt, now)
            expected = missing * view.seconds_per_token
            wait = min(view.wait(self._seconds), MOST_WAIT_SECONDS)
            # equal costs are decided by chance, or a burst would go to one
            cost = wait + MISS_WEIGHT * expected
            costs.append((cost, self._random.random(), view, resident, expected))
        _, _, view, resident, expected = min(costs, key=lambda each: each[:2])
        self._requests += 1
        view.open += 1
        view.pending[self._requests] = expected + self._seconds
        view.believe([chunk.name for chunk in prompt.chunks], now)
        view.begin([name for name, _ in prompt.beginnings])
        return Decision(self._requests, view.id, resident, len(prompt.chunks), expected)

    def began(self, decision: Decision, seconds: float) -> None:
        """Note that a request has its first byte, so many seconds after it was sent."""
        view = self._replicas[decision.replica]
        if view.pending.pop(decision.request, None) is not None:
            beyond = max(0.0, seconds - decision.expected)
            self._seconds += SMOOTHING * (min(beyond, MOST_WAIT_SECONDS) - self._seconds)

    def ended(self, decision: Decision) -> None:
        """Note that a request has ended, however it did."""
        view = self._replicas[decision.replica]
        view.pending.pop(decision.request, None)
        view.open -= 1

    def _missing(self, view: Replica, prompt: PromptOutline, now: float) -> tuple[int, int]:
        """Return about how many tokens of a prompt a replica has to compute, and how many of its
        chunks it has."""
        absent = [
            chunk
            for chunk in prompt.chunks
            if not view.has(chunk.name, self._names.key(chunk.name), now)
        ]
        missing = sum(chunk.tokens for chunk in absent)
        if prompt.beginnings:
            known = max((n for name, n in prompt.beginnings if name in view.beginnings), default=0)
            missing += prompt.beginnings[-1][1] - known
        return missing, len(prompt.chunks) - len(absent)
