"""The cost of a prompt on each replica beyond linking it: the seconds of loading and computing
chunks that are not in memory there. Replicas are numbers here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.residency import MEMORY, ResidencyReport, TierCost
from kvlinker_fleet.naming import PromptOutline, WantedChunk
from kvlinker_fleet.replicas import MEMORY_TIER, ResidencyIndex

UNMEASURED_SHARE = 0.5
"""The time to load a token from a tier whose bandwidth was not measured yet, as a share of the time
to compute it."""

FIRST_SECONDS_PER_TOKEN = 2e-4
"""The time to compute a token until some replica has reported its own; one that has not is taken to
be like the others."""

STALE_SECONDS = 10.0
"""The seconds without a request after which a replica's measurements do not count any more: one
that was slow when it was measured would get no request that could show otherwise."""

HALVED_AFTER = 100_000
"""The uses after which all counts are halved: chunks that were hot long ago count less, and those
that were wanted once no longer count."""

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
        self.index = ResidencyIndex()
        """Where chunks and beginnings are."""

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
        self.index.forget(replica)
        self._measured[replica] = False

    def hottest(self, most: int) -> list[str]:
        """Return the keys of the chunks that are wanted most often, those first."""
        return [f"{key:064x}" for key in self._hot.hottest(most)]

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
        self.index.report(replica, chunks, report.gone, whole=report.whole)
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
        computing = self._seconds_per_token(now)
        chunks, lines = self._recognise(prompt)
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
            if beginners := self.index.beginners(name):
                missing[list(beginners)] = length - beginning
        missing += sum(line.tokens for line in lines)
        for line in lines:
            if beginners := self.index.beginners(line.name):
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
        self._hot.note(key for name in names if (key := self.index.key(name)) is not None)
        self.index.believe(replica, names, now)
        self.index.begin(replica, [name for name, _ in prompt.beginnings])
        self.index.begin(replica, [line.name for line in prompt.lines])

    def _recognise(
        self, prompt: PromptOutline
    ) -> tuple[Sequence[WantedChunk], Sequence[WantedChunk]]:
        """Return a prompt's chunks, including those that contain lines of its plain texts, and the
        lines for which no replica reported a chunk."""
        unknown: list[WantedChunk] = []
        found: dict[int, WantedChunk] = {}
        for line in prompt.lines:
            key = self.index.key(line.name)
            if key is None:
                unknown.append(line)
            elif key in found:
                found[key] = found[key]._replace(tokens=found[key].tokens + line.tokens)
            else:
                found[key] = line
        return (*prompt.chunks, *found.values()), unknown

    def _seconds_per_token(self, now: float) -> Seconds:
        """Return the seconds of computing a token, on each replica: its measurement, or the mean of
        the others if that is stale."""
        stale = now - self._used > STALE_SECONDS
        known = self._per_token[self._measured & ~stale]
        return np.where(stale, known.mean(), self._per_token) if len(known) else self._per_token

    def _of_token(self, name: str, now: float, computing: Seconds) -> Seconds:
        """Return the seconds for each token of a chunk, on each replica."""
        copies = self.index.copies(name, now)
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
                    self.index.share(number)
        places = {MEMORY: None} | {name: cost.place for name, cost in tiers.items()}
        return {name: 1 << self._tiers[name, place] for name, place in places.items()}


class HotChunks:
    """Counts which chunks requests want, so that a server that joins can read the hottest ones into
    memory. Chunks are numbers here."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        self._counted = 0

    def note(self, chunks: Iterable[int]) -> None:
        """Count a use of each chunk."""
        for chunk in chunks:
            self._uses[chunk] += 1
            self._counted += 1
        if self._counted >= HALVED_AFTER:
            self._counted = 0
            self._uses = Counter({chunk: n // 2 for chunk, n in self._uses.items() if n > 1})

    def hottest(self, most: int) -> list[int]:
        """Return the chunks that are wanted most often, those first, but none that was wanted only
        once."""
        return [chunk for chunk, uses in self._uses.most_common(most) if uses > 1]
