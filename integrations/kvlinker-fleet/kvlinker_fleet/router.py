"""Chooses the replica for a request: the one with the least expected wait plus the time to load or
compute the chunks that it does not have in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvlinker.base.types.residency import ResidencyReport, TierCost
from kvlinker_fleet.costs import PromptCosts
from kvlinker_fleet.naming import PromptOutline

MISS_WEIGHT = 2.5
"""The weight of a second of loading or computing a chunk against a second of waiting: a chunk that
is loaded on another replica is loaded there again and again, and displaces other chunks."""

SATURATION = 0.5
"""The mean wait of all other replicas, in times that the whole prompt takes to compute, at which a
wait counts half as much as where they are idle. Where all replicas are overloaded, having the
chunks decides, which ends the overload. Chosen by simulation (`kvlinker-lab fleet`)."""

FIRST_SECONDS = 0.05
"""The expected time of a request until some were measured, beyond computing missing chunks."""

LEAST_SECONDS = 1e-3
"""The least that a request takes beyond that, however short it was."""

SMOOTHING = 0.1
"""The share of the last request in the mean time of requests."""

MOST_SHARE = 0.1
"""The share of itself by which a request's time to the first byte may grow with each answer under
way, and does until something else is measured: so it is where two processors compute a small
model. On a GPU, a step takes hardly longer for one more answer."""

SLOWDOWN_SMOOTHING = 0.01
"""The share of the last request in the mean of slowdowns."""

MOST_ERROR = 3.0
"""An error of more times the expected seconds has another reason."""

_CHANCE_SECONDS = 1e-9
"""By so much may costs differ that are equal: chance decides, or a burst would go to one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The replica of a request, with the reasons. ``expected`` are the seconds of loading and
    computing chunks that are not in memory there, and ``wait`` the seconds before. Of the
    ``chunks``, ``resident`` are in memory there, and ``loaded`` can be loaded."""

    request: int
    replica: str
    resident: int
    loaded: int
    chunks: int
    expected: float
    wait: float

    @property
    def reason(self) -> str:
        """The text for the access log."""
        loaded = f", {self.loaded} to load" if self.loaded else ""
        return f"{self.replica}: {self.resident} of {self.chunks} chunks{loaded}"


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
    """The number of chunks in its memory."""

    counted: int = 0
    """This router's requests that the next report may count: under way when it was asked for, or
    begun since."""

    leaving: bool = False
    """True if it is forgotten when the last of this router's requests has ended."""


class _Pending(NamedTuple):
    """A request without a first byte: the seconds for which others are expected to wait for it, and
    how many answers were under way at its replica when it was sent."""

    seconds: float
    answers: int


class Router:
    """Keeps the view of all replicas, and decides. Belongs to one thread, or one event loop. Times
    are in seconds of one monotonic clock."""

    def __init__(self, *, seed: int | None = None) -> None:
        self._replicas: dict[str, Replica] = {}
        self._ids: list[str] = []
        self._numbers: dict[str, int] = {}
        self._unused: list[int] = []  # numbers of replicas that were removed
        self._costs = PromptCosts()
        self._requests = 0
        self._pending: dict[int, _Pending] = {}  # requests without a first byte
        self._seconds = FIRST_SECONDS
        self._slowdown = Slowdown()
        self._random = np.random.default_rng(seed)
        # by replica
        self._ready = np.zeros(0, dtype=bool)
        self._own_wait = np.zeros(0)  # seconds of this router's requests without a first byte
        self._others = np.zeros(0)  # requests of others
        self._open = np.zeros(0, dtype=np.int64)  # this router's requests under way
        self._waiting = np.zeros(0, dtype=np.int64)  # those of them without a first byte

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
        self._costs.add(number)

    def remove(self, replica: str) -> None:
        """Know a replica no more, once its last request has ended; it gets no others."""
        self.set_ready(replica, False)
        self._replicas[replica].leaving = True
        self._forget_if_gone(replica)

    def set_ready(self, replica: str, ready: bool) -> None:
        """Send requests to a replica, or none."""
        self._replicas[replica].ready = self._ready[self._numbers[replica]] = ready

    def note_poll(self, replica: str) -> None:
        """Note that a replica is asked for a report now."""
        self._replicas[replica].counted = int(self._open[self._numbers[replica]])

    def report(
        self,
        replica: str,
        report: ResidencyReport,
        *,
        running: int,
        waiting: int,
        seconds_per_token: float | None,
        tiers: Mapping[str, TierCost] = MappingProxyType({}),
    ) -> bool:
        """Take a replica's report, and the costs of its slower ``tiers``.

        Returns False if it does not follow the last one, so that a complete report is needed; known
        chunks stay until then. Raises KeyError if a chunk is in a tier that has no costs there.
        """
        view, number = self._replicas[replica], self._numbers[replica]
        if not report.whole and report.epoch != view.epoch:
            return False
        if report.epoch != view.epoch:
            self._costs.forget(number)
        self._costs.report(number, report, seconds_per_token, tiers)
        view.epoch, view.report_number = report.epoch, report.number
        view.running, view.waiting = running, waiting
        view.chunks = self._costs.index.count(number)
        self._others[number] = max(0, running + waiting - view.counted)
        return True

    def holders(self, name: str, now: float) -> list[str]:
        """Return the replicas that have a chunk in memory, or are about to, by its name."""
        return sorted(self._ids[number] for number in self._costs.index.holders(name, now))

    def hottest(self, most: int) -> list[str]:
        """Return the keys of the chunks that requests want most often, those first."""
        return self._costs.hottest(most)

    def note_made(self, replica: str, names: Sequence[str], now: float) -> None:
        """Assume that a replica has the chunks of a request in memory, by its names, until a report
        confirms it."""
        if replica in self._numbers:
            self._costs.index.believe(self._numbers[replica], names, now)

    def note_beginnings(self, replica: str, stored: Iterable[str], removed: Iterable[str]) -> None:
        """Note which beginnings of prompts a replica has now, and which it has no more, from its
        events; events of unknown replicas are ignored."""
        if replica in self._numbers:
            self._costs.index.begin(self._numbers[replica], stored)
            self._costs.index.end(self._numbers[replica], removed)

    def choose(
        self, prompt: PromptOutline, now: float, *, without: Collection[str] = ()
    ) -> Decision | None:
        """Decide where a request goes that is sent now, but to none of ``without``; None if no
        replica is ready."""
        possible = self._ready.copy()
        possible[[self._numbers[each] for each in without if each in self._numbers]] = False
        if not possible.any():
            return None
        needed = self._costs.of(prompt, now)
        wait = np.maximum(self._own_wait + self._others * self._seconds, 0.0)
        long = SATURATION * needed.computed + self._seconds
        elsewhere = np.maximum(wait[possible].sum() - wait, 0.0) / max(1, possible.sum() - 1)
        cost = wait / (1 + elsewhere / long) + MISS_WEIGHT * needed.seconds
        cost += self._open * self._slowdown.share * (self._seconds + needed.seconds)
        cost += self._random.random(len(cost)) * _CHANCE_SECONDS
        number = int(np.where(possible, cost, np.inf).argmin())
        self._requests += 1
        decision = Decision(
            self._requests,
            self._ids[number],
            int(needed.resident[number]),
            int(needed.loaded[number]),
            len(needed.chunks),
            float(needed.seconds[number]),
            float(wait[number]),
        )
        self._take(decision, number)
        self._costs.take(number, prompt, needed.chunks, now)
        return decision

    def note_first_byte(self, decision: Decision, seconds: float) -> None:
        """Note that a request has its first byte, ``seconds`` after it was sent."""
        pending = self._settle(decision)
        if pending is not None:
            self._slowdown.note(pending.answers, decision.wait + pending.seconds, seconds)
            beyond = max(LEAST_SECONDS, seconds - decision.expected - decision.wait)
            self._seconds += SMOOTHING * (beyond - self._seconds)

    def note_end(self, decision: Decision) -> None:
        """Note that a request has ended, however it did."""
        self._settle(decision)
        self._open[self._numbers[decision.replica]] -= 1
        self._forget_if_gone(decision.replica)

    def _new_number(self) -> int:
        self._ids.append("")
        self._ready = np.append(self._ready, False)
        self._own_wait = np.append(self._own_wait, 0.0)
        self._others = np.append(self._others, 0.0)
        self._open = np.append(self._open, 0)
        self._waiting = np.append(self._waiting, 0)
        return len(self._ids) - 1

    def _forget_if_gone(self, replica: str) -> None:
        number = self._numbers[replica]
        if self._replicas[replica].leaving and not self._open[number]:
            del self._replicas[replica], self._numbers[replica]
            self._costs.forget(number)
            self._unused.append(number)

    def _take(self, decision: Decision, number: int) -> None:
        """Count a request to its replica."""
        pending = _Pending(
            decision.expected + self._seconds, int(self._open[number] - self._waiting[number])
        )
        self._pending[decision.request] = pending
        self._own_wait[number] += pending.seconds
        self._open[number] += 1
        self._waiting[number] += 1
        self._replicas[decision.replica].counted += 1

    def _settle(self, decision: Decision) -> _Pending | None:
        """End the wait for a request; returns None if there was none."""
        pending = self._pending.pop(decision.request, None)
        if pending is not None:
            number = self._numbers[decision.replica]
            self._own_wait[number] -= pending.seconds
            self._waiting[number] -= 1
        return pending


class Slowdown:
    """Learns how much answers under way slow down a request for its first byte: compares requests
    among many answers with requests among few, by a regression that forgets. ``MOST_SHARE`` is
    taken to have been found before, at a variance of one answer."""

    def __init__(self) -> None:
        self.share = MOST_SHARE
        """The share by which a request's time to the first byte grows with each answer."""
        self._requests = 0
        self._answers = self._error = 0.0  # in the mean
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, answers: int, expected: float, seconds: float) -> None:
        """Note that a request had its first byte after ``seconds``, where ``expected`` were
        predicted, with ``answers`` under way."""
        self._requests += 1
        more = answers - self._answers
        late = min(MOST_ERROR, seconds / expected - 1) - self._error
        newest = max(SLOWDOWN_SMOOTHING, 1 / self._requests)
        self._answers += newest * more
        self._error += newest * late
        self._variance += SLOWDOWN_SMOOTHING * (more**2 - self._variance)
        self._covariance += SLOWDOWN_SMOOTHING * (more * late - self._covariance)
        learnt = (self._covariance + MOST_SHARE) / (self._variance + 1)
        self.share = min(MOST_SHARE, max(0.0, learnt))
