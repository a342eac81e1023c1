"""Chooses the replica for a request: the one with the least expected wait plus the time to compute
what it does not have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.residency import ResidencyReport
from kvlinker.fleet.naming import PromptOutline
from kvlinker.fleet.replicas import ResidencyIndex

MISS_WEIGHT = 2.5
"""How much a second of computing a missing chunk counts against a second of waiting: what is
computed elsewhere is computed again and again, and takes the place of other chunks."""

SATURATION = 0.5
"""Waits beyond the least one count in full while somebody is idle, and half as much when even the
least is so many times what computing the whole prompt takes. Where all replicas are overloaded,
having the chunks decides, which is what ends the overload."""

FIRST_SECONDS = 0.05
"""The expected time of a request until some were measured, beyond computing what is missing."""

LEAST_SECONDS = 1e-3
"""The least that a request takes beyond that, however short it was."""

FIRST_SECONDS_PER_TOKEN = 2e-4
"""The time to compute a token until a replica has told its own."""

SMOOTHING = 0.1
"""The share of the last request in the mean of what requests take."""

_CHANCE_SECONDS = 1e-9
"""By so much may costs differ that are equal: chance decides, or a burst would go to one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why. ``expected``: seconds of computing what is missing there, and
    ``wait`` those before."""

    request: int
    replica: str
    resident: int
    chunks: int
    expected: float
    wait: float

    @property
    def reason(self) -> str:
        """What the access log says."""
        return f"{self.replica}: {self.resident} of {self.chunks} chunks"


@dataclass(slots=True)
class Replica:
    """One replica, as it reported itself."""

    id: str
    ready: bool = False
    epoch: str | None = None
    report_number: int = 0
    running: int = 0
    waiting: int = 0

    chunks: int = 0
    """Those in its memory."""

    open: int = 0
    """This router's requests under way."""

    counted: int = 0
    """Those of them that the next report may count: open when it was asked for, or begun since."""

    leaving: bool = False
    """True if it is forgotten when the last of this router's requests has ended."""


class Router:
    """Keeps the view of all replicas, and decides. Belongs to one thread, or one event loop. Times
    are in seconds of one monotonic clock."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._replicas: dict[str, Replica] = {}
        self._ids: list[str] = []
        self._numbers: dict[str, int] = {}
        self._unused: list[int] = []  # numbers of replicas that were removed
        self._index = ResidencyIndex()
        self._requests = 0
        self._pending: dict[int, float] = {}  # expected seconds of requests without a first byte
        self._seconds = FIRST_SECONDS
        self._random = np.random.default_rng(seed)
        # by replica
        self._ready = np.zeros(0, dtype=bool)
        self._own_wait = np.zeros(0)  # seconds of this router's requests without a first byte
        self._others = np.zeros(0)  # requests of others
        self._seconds_per_token = np.zeros(0)

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """All replicas, by id."""
        return self._replicas

    def add(self, replica: str) -> None:
        """Know a replica, which is not ready until ``set_ready`` says so."""
        if replica in self._replicas:
            self._replicas[replica].leaving = False
            return
        number = self._unused.pop() if self._unused else self._new_number()
        self._ids[number] = replica
        self._numbers[replica] = number
        self._replicas[replica] = Replica(replica)
        self._ready[number] = False
        self._own_wait[number] = self._others[number] = 0.0
        self._seconds_per_token[number] = FIRST_SECONDS_PER_TOKEN

    def remove(self, replica: str) -> None:
        """Know a replica no more, once its last request has ended; it gets no others."""
        self.set_ready(replica, False)
        self._replicas[replica].leaving = True
        self._forget_if_gone(replica)

    def set_ready(self, replica: str, ready: bool) -> None:
        """Send requests to a replica, or none."""
        self._replicas[replica].ready = self._ready[self._numbers[replica]] = ready

    def asked(self, replica: str) -> None:
        """Note that a replica is asked for a report now."""
        view = self._replicas[replica]
        view.counted = view.open

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
        view, number = self._replicas[replica], self._numbers[replica]
        if not report.whole and report.epoch != view.epoch:
            return False
        if report.epoch != view.epoch:
            self._index.forget(number)
        self._index.report(number, report.resident, report.gone, whole=report.whole)
        view.epoch, view.report_number = report.epoch, report.number
        view.running, view.waiting = running, waiting
        view.chunks = self._index.count(number)
        self._others[number] = max(0, running + waiting - view.counted)
        if seconds_per_token is not None:
            self._seconds_per_token[number] = seconds_per_token
        return True

    def choose(
        self, prompt: PromptOutline, now: float, *, without: Collection[str] = ()
    ) -> Decision | None:
        """Decide where a request goes that is sent now, but to none of ``without``; None where no
        replica is ready."""
        possible = self._ready.copy()
        possible[[self._numbers[each] for each in without if each in self._numbers]] = False
        if not possible.any():
            return None
        known, resident = self._known(prompt, now)
        whole = sum(chunk.tokens for chunk in prompt.chunks)
        whole += prompt.beginnings[-1][1] if prompt.beginnings else 0
        expected = (whole - known) * self._seconds_per_token
        wait = np.maximum(self._own_wait + self._others * self._seconds, 0.0)
        least = wait[possible].min()
        long = SATURATION * whole * self._seconds_per_token + self._seconds
        cost = (wait - least) / (1 + least / long) + MISS_WEIGHT * expected
        cost += self._random.random(len(cost)) * _CHANCE_SECONDS
        number = int(np.where(possible, cost, np.inf).argmin())
        self._requests += 1
        decision = Decision(
            self._requests,
            self._ids[number],
            int(resident[number]),
            len(prompt.chunks),
            float(expected[number]),
            float(wait[number]),
        )
        self._take(decision, prompt, number, now)
        return decision

    def began(self, decision: Decision, seconds: float) -> None:
        """Note that a request has its first byte, so many seconds after it was sent."""
        if self._settle(decision):
            beyond = max(LEAST_SECONDS, seconds - decision.expected - decision.wait)
            self._seconds += SMOOTHING * (beyond - self._seconds)

    def ended(self, decision: Decision) -> None:
        """Note that a request has ended, however it did."""
        self._settle(decision)
        self._replicas[decision.replica].open -= 1
        self._forget_if_gone(decision.replica)

    def _new_number(self) -> int:
        self._ids.append("")
        self._ready = np.append(self._ready, False)
        self._own_wait = np.append(self._own_wait, 0.0)
        self._others = np.append(self._others, 0.0)
        self._seconds_per_token = np.append(self._seconds_per_token, 0.0)
        return len(self._ids) - 1

    def _forget_if_gone(self, replica: str) -> None:
        view = self._replicas[replica]
        if view.leaving and not view.open:
            number = self._numbers.pop(replica)
            del self._replicas[replica]
            self._index.forget(number)
            self._unused.append(number)

    def _known(
        self, prompt: PromptOutline, now: float
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return how many tokens of a prompt each replica has, and how many of its chunks."""
        tokens = np.zeros(len(self._ready))
        resident = np.zeros(len(self._ready), dtype=np.int64)
        for chunk in prompt.chunks:
            holders = list(self._index.holders(chunk.name, now))
            tokens[holders] += chunk.tokens
            resident[holders] += 1
        if prompt.beginnings:
            begun = np.zeros(len(self._ready))
            for name, length in prompt.beginnings:  # the longest comes last
                begun[list(self._index.beginners(name))] = length
            tokens += begun
        return tokens, resident

    def _take(self, decision: Decision, prompt: PromptOutline, number: int, now: float) -> None:
        """Count a request to its replica, and believe that it brings its chunks there."""
        view = self._replicas[decision.replica]
        view.open += 1
        view.counted += 1
        self._pending[decision.request] = decision.expected + self._seconds
        self._own_wait[number] += self._pending[decision.request]
        self._index.believe(number, [chunk.name for chunk in prompt.chunks], now)
        self._index.begin(number, [name for name, _ in prompt.beginnings])

    def _settle(self, decision: Decision) -> bool:
        """Let nobody wait for a request any more; returns False where nobody did."""
        seconds = self._pending.pop(decision.request, None)
        if seconds is None:
            return False
        self._own_wait[self._numbers[decision.replica]] -= seconds
        return True
