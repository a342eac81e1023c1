"""The rules of other routers, written anew from what their makers publish of them.

Where their defaults say nothing of our setting, the choice is to their advantage: they know at once
how many requests wait where, and remember as many chunks per replica as it has room for.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvlinker_lab.fleet.replicas import Costs, Fleet
from kvlinker_lab.fleet.rules import Rule

Shares = NDArray[np.float64]


class _Prefixes(Rule):
    """Remembers the beginnings of prompts that each replica was sent, those used last."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        super().__init__(fleet, costs, seed)
        self._sent: defaultdict[int, set[int]] = defaultdict(set)  # replicas, by beginning
        self._of: list[OrderedDict[int, None]] = [OrderedDict() for _ in fleet.replicas]

    def choose(self, request: int, chunks: Sequence[int], now: float) -> int:
        chains = _chains(chunks)
        shares = np.zeros(len(self.fleet.replicas))
        for length, chain in enumerate(chains, 1):
            found = self._sent.get(chain)
            if not found:
                break
            shares[list(found)] = length / len(chains)
        replica = self._best(request, chunks, np.where(self.fleet.alive, shares, 0))
        mine = self._of[replica]
        for chain in chains:
            self._sent[chain].add(replica)
            mine[chain] = None
            mine.move_to_end(chain)
        while len(mine) > self.fleet.replicas[replica].room:
            self._forget(replica, mine.popitem(last=False)[0])
        return replica

    def set_alive(self, replica: int, alive: bool) -> None:
        for chain in self._of[replica]:
            self._forget(replica, chain)
        self._of[replica].clear()

    def _forget(self, replica: int, chain: int) -> None:
        self._sent[chain].discard(replica)
        if not self._sent[chain]:
            del self._sent[chain]

    def _best(self, request: int, chunks: Sequence[int], shares: Shares) -> int:
        """Return the best replica; ``shares`` of the prompt are known to be its beginning there."""
        raise NotImplementedError

    def _highest(self, scores: Shares) -> int:
        """Return a replica with the highest score; chance decides between equal ones."""
        scores = scores + 1e-6 * self.random.random(len(scores))
        return int(np.where(self.fleet.alive, scores, -np.inf).argmax())


class RayPrefix(_Prefixes):
    """Ray Serve LLM's PrefixCacheAffinityRouter (docs.ray.io, 2.60): of those with the longest
    beginning the one with the shortest queue, or who has the least in its tree where no beginning
    has a tenth of the prompt. Where queues differ by more than 10, the better of two by chance."""

    IMBALANCE = 10
    LEAST_SHARE = 0.1

    def _best(self, request: int, chunks: Sequence[int], shares: Shares) -> int:
        alive, waiting = np.flatnonzero(self.fleet.alive), self.fleet.waiting
        if np.ptp(waiting[alive]) > self.IMBALANCE:
            possible = self.random.choice(alive, min(2, len(alive)), replace=False)
        elif shares.max() >= self.LEAST_SHARE:
            possible = np.flatnonzero(shares == shares.max())
        else:
            sizes = np.array([len(self._of[each]) for each in alive])
            possible = alive[sizes == sizes.min()]
        queues = waiting[possible] + self.random.random(len(possible))
        return int(possible[queues.argmin()])


class LlmdPrefix(_Prefixes):
    """llm-d's optimized baseline (llm-d.ai, 0.10), by scores from 0 to 1: the beginning's share
    three times, the queue's shortness twice, and twice, for prompts that nobody has a beginning of,
    who was least lately sent such a prompt. KV caches are full, so that their use tells nothing."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        super().__init__(fleet, costs, seed)
        self._cold = np.full(len(fleet.replicas), -1)  # the last request without a beginning

    def _best(self, request: int, chunks: Sequence[int], shares: Shares) -> int:
        alive, waiting = self.fleet.alive, self.fleet.waiting
        least, most = waiting[alive].min(), waiting[alive].max()
        scores = 3 * shares
        if most > least:
            scores += 2 * (most - waiting) / (most - least)
        if shares.any():
            return self._highest(scores)
        ranks = np.argsort(np.argsort(self._cold, kind="stable"), kind="stable")
        best = self._highest(scores + 2 * (1 - ranks / max(1, len(ranks) - 1)))
        self._cold[best] = request
        return best


class Approximate(_Prefixes):
    """NVIDIA Dynamo's KV router without events (docs.nvidia.com/dynamo, 1.3): the fewest blocks to
    compute, those of requests without a first byte among them, plus blocks of all requests under
    way, by what its own decisions brought to each replica. Blocks are chunks here."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        super().__init__(fleet, costs, seed)
        self._computing = np.zeros(len(fleet.replicas))
        self._active = np.zeros(len(fleet.replicas))
        self._open: dict[int, tuple[int, float, int]] = {}  # replica, blocks to compute, blocks

    def _best(self, request: int, chunks: Sequence[int], shares: Shares) -> int:
        missing = len(chunks) * (1 - shares)
        best = self._highest(-(self._computing + missing + self._active))
        self._open[request] = best, float(missing[best]), len(chunks)
        self._computing[best] += missing[best]
        self._active[best] += len(chunks)
        return best

    def note_first_byte(self, request: int, seconds: float) -> None:
        replica, missing, blocks = self._open[request]
        self._computing[replica] -= missing
        self._open[request] = replica, 0.0, blocks

    def note_end(self, request: int) -> None:
        replica, missing, blocks = self._open.pop(request)
        self._computing[replica] -= missing
        self._active[replica] -= blocks


class BoundedHash(Rule):
    """Consistent hashing with bounded loads (Mirrokni et al., 2018), here by rendezvous: the owner
    of the prompt's first chunk, or the next one where that has 1.25 times the mean of requests."""

    BOUND = 1.25

    def choose(self, request: int, chunks: Sequence[int], now: float) -> int:
        alive, waiting = self.fleet.alive, self.fleet.waiting
        most = np.ceil(self.BOUND * (waiting[alive].sum() + 1) / alive.sum())
        weights = _weights(chunks[0], len(waiting), salt=0)
        return int(np.where(alive & (waiting < most), weights, 0).argmax())


class DualMap(_Prefixes):
    """DualMap (Yuan et al., 2026): of two candidates by two hashes of the prompt's first chunk the
    one with the longer beginning, unless it would miss the SLO: then the sooner one. The SLO is
    three times what computing a whole prompt takes. Its moving of waiting requests is left out."""

    SLO = 3

    def _best(self, request: int, chunks: Sequence[int], shares: Shares) -> int:
        possible, candidates = self.fleet.alive.copy(), list[int]()
        for salt in (0, 1)[: int(possible.sum())]:
            weights = _weights(chunks[0], len(shares), salt)
            candidates.append(int(np.where(possible, weights, 0).argmax()))
            possible[candidates[-1]] = False
        whole = self.costs.link + len(chunks) * self.costs.chunk
        seconds = self.fleet.waiting * (self.costs.link + whole) / 2
        seconds = seconds + whole - shares * len(chunks) * self.costs.chunk
        best = max(candidates, key=lambda each: (shares[each], -seconds[each]))
        if seconds[best] <= self.SLO * whole:
            return best
        return min(candidates, key=seconds.__getitem__)


def _chains(chunks: Sequence[int]) -> list[int]:
    """Return a number for each beginning of a prompt."""
    chain, chains = 0, []
    for chunk in chunks:
        chain = hash((chain, chunk))
        chains.append(chain)
    return chains


def _weights(chunk: int, replicas: int, salt: int) -> NDArray[np.uint64]:
    """Return a hash of a chunk with each replica: the replica with the highest owns it."""
    mixed = np.arange(1, replicas + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64((chunk * 2 + salt + 1) * 0xBF58476D1CE4E5B9 % 2**64)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(29))
