"""The cost of a prompt on each replica beyond linking it: the seconds of loading and computing
chunks that are not in memory there. Replicas are numbers here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.residency import MEMORY, ResidencyReport, TierCost
from kvlinker.fleet.hot_chunks import HotChunks
from kvlinker.fleet.naming import PromptOutline, WantedChunk
from kvlinker.fleet.replicas import MEMORY_TIER, ResidencyIndex

UNMEASURED_SHARE = 0.5
"""The time to load a token from a tier whose bandwidth was not measured yet, as a share of the time
to compute it."""

FIRST_SECONDS_PER_TOKEN = 2e-4
"""The time to compute a token until some replica has reported its own; one that has not is taken to
be like the others."""

STALE_SECONDS = 10.0
"""The seconds without a request after which a replica's measurements do not count any more: one
that was slow when it was measured would get no request that could show otherwise."""

Seconds = NDArray[np.float64]


class PromptCost(NamedTuple):
    """The cost of a prompt, by replica: ``seconds``, of which it would be ``computed`` where
    nothing is known of it; and how many of its ``chunks`` are in memory, and in slower tiers."""

    seconds: Seconds
    computed: Seconds
    chunks: Sequence[WantedChunk]
    resident: NDArray[np.int64]
    loaded: NDArray[np.int64]


class PromptCosts:
    """Knows which replica has which chunk where, and its costs of loading and computing."""

    def __init__(self) -> None:
        self._index = ResidencyIndex()
        self._hot = HotChunks()
        self._per_token = np.zeros(0)  # seconds of computing, by replica
        self._measured = np.zeros(0, dtype=bool)
        self._used = np.zeros(0)  # when a replica got its last request
        self._tiers: dict[tuple[str, str | None], int] = {(MEMORY, None): MEMORY_TIER}
        self._load = np.zeros((1, 0))  # seconds per token, by tier and replica

    def add(self, replica: int) -> None:
        """Know a replica by the next number, or by one that was used before."""
        if replica == len(self._per_token):
            self._per_token = np.append(self._per_token, 0.0)
            self._measured = np.append(self._measured, False)
            self._used = np.append(self._used, -np.inf)
            self._load = np.hstack([self._load, np.zeros((len(self._load), 1))])
        self._compute(replica, None)
        self._used[replica] = -np.inf
        self._load[:, replica] = np.inf
        self._load[MEMORY_TIER, replica] = 0.0

    def forget(self, replica: int) -> None:
        """Forget everything that a replica loses when it ends."""
        self._index.forget(replica)
        self._measured[replica] = False

    def resident(self, replica: int) -> int:
        """Return how many chunks a replica has reported in its memory."""
        return self._index.count(replica)

    def hottest(self, most: int) -> list[str]:
        """Return the keys of the chunks that are wanted most often, those first."""
        return [f"{key:064x}" for key in self._hot.hottest(most)]

    def holders(self, name: str, now: float) -> set[int]:
        """Return the replicas that have a chunk in memory, or are about to, by its name."""
        copies = self._index.copies(name, now)
        in_memory = copies.replicas[copies.tiers == MEMORY_TIER].tolist()
        return {*in_memory, *copies.believed}

    def report(
        self,
        replica: int,
        report: ResidencyReport,
        seconds_per_token: float | None,
        tiers: Mapping[str, TierCost],
    ) -> None:
        """Take a replica's report, and the costs of its slower tiers. Raises KeyError if a chunk is
        in a tier that has no costs there."""
        bits = self._bits(tiers)
        chunks = {
            key: (sum(bits[tier] for tier in chunk.tiers), chunk.names)
            for key, chunk in report.chunks.items()
        }
        self._index.report(replica, chunks, report.gone, whole=report.whole)
        self._compute(replica, seconds_per_token)
        self._load[MEMORY_TIER + 1 :, replica] = np.inf
        for tier, cost in tiers.items():
            seconds = cost.seconds_per_token
            if seconds is None:
                seconds = UNMEASURED_SHARE * self._per_token[replica]
            self._load[self._tiers[tier, cost.place], replica] = seconds

    def _compute(self, replica: int, seconds_per_token: float | None) -> None:
        """Note the time of a replica to compute a token, or that it was not measured yet."""
        self._measured[replica] = seconds_per_token is not None
        if seconds_per_token is None:
            others = self._per_token[self._measured]
            seconds_per_token = float(others.mean()) if len(others) else FIRST_SECONDS_PER_TOKEN
        self._per_token[replica] = seconds_per_token

    def of(self, prompt: PromptOutline, now: float) -> PromptCost:
        """Return the cost of a prompt on each replica."""
        replicas = len(self._per_token)
        computing = self._computing(now)
        chunks, lines = self._recognised(prompt)
        seconds = np.zeros(replicas)
        resident = np.zeros(replicas, dtype=np.int64)
        loaded = np.zeros(replicas, dtype=np.int64)
        for chunk in chunks:
            per_token = self._of_token(chunk.name, now, computing)
            seconds += chunk.tokens * per_token
            resident += per_token == 0
            loaded += (per_token > 0) & (per_token < computing)
        length = prompt.beginnings[-1][1] if prompt.beginnings else 0
        missing = np.full(replicas, length)
        for name, beginning in prompt.beginnings:  # the longest comes last
            if beginners := self._index.beginners(name):
                missing[list(beginners)] = length - beginning
        missing += sum(line.tokens for line in lines)
        for line in lines:
            if beginners := self._index.beginners(line.name):
                missing[list(beginners)] -= line.tokens
        seconds += missing * computing
        whole = length + sum(each.tokens for each in (*chunks, *lines))
        return PromptCost(seconds, whole * computing, chunks, resident, loaded)

    def take(
        self, replica: int, prompt: PromptOutline, chunks: Sequence[WantedChunk], now: float
    ) -> None:
        """Believe that a prompt that is sent to a replica brings its ``chunks`` there, and the rest
        of its text."""
        self._used[replica] = now
        names = [chunk.name for chunk in chunks]
        self._hot.note(key for name in names if (key := self._index.key(name)) is not None)
        self._index.believe(replica, names, now)
        self._index.begin(replica, [name for name, _ in prompt.beginnings])
        self._index.begin(replica, [line.name for line in prompt.lines])

    def believe(self, replica: int, names: Sequence[str], now: float) -> None:
        """Believe that a replica has chunks in memory, by their names."""
        self._index.believe(replica, names, now)

    def note_beginnings(self, replica: int, stored: Iterable[str], removed: Iterable[str]) -> None:
        """Note which beginnings a replica has now, and which it has no more."""
        self._index.begin(replica, stored)
        self._index.end(replica, removed)

    def _recognised(
        self, prompt: PromptOutline
    ) -> tuple[Sequence[WantedChunk], Sequence[WantedChunk]]:
        """Return a prompt's chunks, including those that contain lines of its plain texts, and the
        lines for which no replica reported a chunk."""
        unknown: list[WantedChunk] = []
        found: dict[int, WantedChunk] = {}
        for line in prompt.lines:
            key = self._index.key(line.name)
            if key is None:
                unknown.append(line)
            elif key in found:
                found[key] = found[key]._replace(tokens=found[key].tokens + line.tokens)
            else:
                found[key] = line
        return (*prompt.chunks, *found.values()), unknown

    def _computing(self, now: float) -> Seconds:
        """Return the seconds of computing a token, on each replica: its measurement, or the mean of
        the others if that is stale."""
        stale = now - self._used > STALE_SECONDS
        known = self._per_token[self._measured & ~stale]
        return np.where(stale, known.mean(), self._per_token) if len(known) else self._per_token

    def _of_token(self, name: str, now: float, computing: Seconds) -> Seconds:
        """Return the seconds for each token of a chunk, on each replica."""
        copies = self._index.copies(name, now)
        per_token = computing
        for tier in copies.shared:
            per_token = np.minimum(per_token, self._load[tier])
        per_token = per_token.copy()
        loading = self._load[copies.tiers, copies.replicas]
        per_token[copies.replicas] = np.minimum(per_token[copies.replicas], loading)
        per_token[copies.believed] = 0.0
        return per_token

    def _bits(self, tiers: Mapping[str, TierCost]) -> dict[str, int]:
        """Return a bit for each tier of a replica, by its name there."""
        for name, cost in tiers.items():
            if (name, cost.place) not in self._tiers:
                number = self._tiers[name, cost.place] = len(self._tiers)
                self._load = np.vstack([self._load, np.full(self._load.shape[1], np.inf)])
                if cost.place is not None:
                    self._index.share(number)
        places = {MEMORY: None} | {name: cost.place for name, cost in tiers.items()}
        return {name: 1 << self._tiers[name, place] for name, place in places.items()}
