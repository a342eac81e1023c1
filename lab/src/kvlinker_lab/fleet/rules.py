"""Rules of routing: their interface, those that look at the load alone, and the one of this
project."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.base.types.residency import MEMORY, KnownChunk, ResidencyReport, TierCost
from kvlinker_fleet.naming import PromptOutline, WantedChunk
from kvlinker_fleet.router import Decision, Router
from kvlinker_lab.fleet.replicas import Costs, Fleet

TOKENS = 512
"""The tokens of a chunk."""


class Rule:
    """Decides where a prompt goes, among replicas that are alive."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        self.fleet = fleet
        self.costs = costs
        self.random = np.random.default_rng(seed)

    def choose(self, request: int, chunks: Sequence[int], now: float) -> int:
        """Return the replica that a request is sent to."""
        raise NotImplementedError

    def note_first_byte(self, request: int, seconds: float) -> None:
        """Note the first byte of a request, ``seconds`` after it was sent."""

    def note_end(self, request: int) -> None:
        """Note that a request has its answer, or that its replica ended."""

    def report(self) -> None:
        """Take what all replicas report."""

    def set_alive(self, replica: int, alive: bool) -> None:
        """Note that a replica ended, or takes requests."""

    def hottest(self, most: int) -> list[int]:
        """Return the chunks that a replica is to have in memory before it joins."""
        return []


class RoundRobin(Rule):
    """One after another."""

    _turn = -1

    def choose(self, request: int, chunks: Sequence[int], now: float) -> int:
        alive = np.flatnonzero(self.fleet.alive)
        self._turn += 1
        return int(alive[self._turn % len(alive)])


class LeastLoaded(Rule):
    """The fewest requests without a first byte; chance decides between equal ones."""

    def choose(self, request: int, chunks: Sequence[int], now: float) -> int:
        load = np.where(self.fleet.alive, self.fleet.waiting, np.inf)
        return int((load + self.random.random(len(load))).argmin())


class Resident(Rule):
    """The library that ``kvlinker router`` uses, fed by reports of changes."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        super().__init__(fleet, costs, seed)
        self._router = Router(seed=seed)
        self._decisions: dict[int, Decision] = {}
        for number in range(len(fleet.replicas)):
            self._router.add(str(number))
            self._router.set_ready(str(number), bool(fleet.alive[number]))
            self._report(number)

    def choose(self, request: int, chunks: Sequence[int], now: float) -> int:
        wanted = tuple(WantedChunk(_name(chunk), TOKENS) for chunk in chunks)
        decision = self._router.choose(PromptOutline(wanted), now)
        assert decision is not None
        self._decisions[request] = decision
        return int(decision.replica)

    def note_first_byte(self, request: int, seconds: float) -> None:
        self._router.note_first_byte(self._decisions[request], seconds)

    def note_end(self, request: int) -> None:
        self._router.note_end(self._decisions.pop(request))

    def report(self) -> None:
        for number, replica in enumerate(self.fleet.replicas):
            if replica.changed:
                self._report(number)

    def set_alive(self, replica: int, alive: bool) -> None:
        self._router.set_ready(str(replica), alive)

    def hottest(self, most: int) -> list[int]:
        return [int(key, 16) for key in self._router.hottest(most)]

    def _report(self, number: int) -> None:
        replica = self.fleet.replicas[number]
        places = {chunk: "disk" for chunk in replica.changed if chunk in replica.disk}
        places |= {chunk: MEMORY for chunk in replica.changed if chunk in replica.memory}
        gone = tuple(_key(chunk) for chunk in replica.changed - places.keys())
        replica.changed.clear()
        chunks = {
            _key(chunk): KnownChunk((tier,), (_name(chunk),)) for chunk, tier in places.items()
        }
        whole = self._router.replicas[str(number)].epoch is None
        self._router.note_poll(str(number))
        self._router.report(
            str(number),
            ResidencyReport("run", 0, whole, chunks, gone),
            running=replica.answering,
            waiting=int(self.fleet.waiting[number]),
            seconds_per_token=self.costs.chunk / TOKENS,
            tiers={"disk": TierCost(self.costs.load / TOKENS)},
        )


def _key(chunk: int) -> str:
    return f"{chunk:064x}"


def _name(chunk: int) -> str:
    return f"chunk {chunk}"
