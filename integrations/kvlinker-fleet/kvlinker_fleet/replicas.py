"""The places of chunks: an index from each chunk to the replicas that have it and their tiers, as
they reported, and as this router's own requests made it. Replicas and tiers are numbers here."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MEMORY_TIER = 0
"""The number of the tier that takes no time."""

BELIEVED_SECONDS = 10.0
"""The most seconds for which a chunk counts as resident where a request was sent that wants it, if
no report mentions it before."""

MOST_BELIEVED = 1_000_000
"""The most names of chunks that are believed at a time."""

KEPT_BEGINNINGS = 1_000_000
"""The most beginnings of conversations, and lines of texts, that are remembered; those used last
stay."""

MOST_NAMES = 4_000_000
"""The most names of chunks that are remembered."""

_REPLICA_BITS = 20
"""The bits of a replica's number in a packed place; the tier's number is above them."""

Numbers = NDArray[np.int64]


class Copies(NamedTuple):
    """Where a chunk can be taken from: ``tiers[i]`` of ``replicas[i]``, the ``shared`` tiers, and
    the memory of the ``believed`` replicas."""

    replicas: Numbers
    tiers: Numbers
    shared: tuple[int, ...]
    believed: list[int]


class ResidencyIndex:
    """Finds the replicas that have a chunk, by its name."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, int] = OrderedDict()  # by name
        self._copies: dict[int, set[int]] = {}  # by key: a tier and a replica in one number
        self._tiers: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by replica, by key
        self._shared: dict[
            int, Counter[int]
        ] = {}  # by shared tier: its keys, with the number of reports
        self._shared_bits = 0
        self._in_memory: Counter[int] = Counter()  # by replica
        self._numbers: dict[int, int] = {}  # one object for each number in _copies
        self._believed: OrderedDict[int | str, dict[int, float]] = OrderedDict()
        """By key, or by name while that is unknown: since when, by replica."""

        self._beginnings: OrderedDict[str, set[int]] = OrderedDict()  # by name

    def count(self, replica: int) -> int:
        """Return how many chunks a replica has reported in its memory."""
        return self._in_memory[replica]

    def share(self, tier: int) -> None:
        """Count the chunks that one replica has in this tier as those of all that use it."""
        self._shared[tier] = Counter()
        self._shared_bits |= 1 << tier

    def copies(self, name: str, now: float) -> Copies:
        """Return the replicas that have a chunk, or will have it soon."""
        key = self._keys.get(name)
        numbers = () if key is None else self._copies.get(key, ())
        places = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
        shared = [tier for tier, keys in self._shared.items() if key in keys]
        believed = [self._believed.get(name)]
        if key is not None:
            believed.append(self._believed.get(key))
        return Copies(
            places & ((1 << _REPLICA_BITS) - 1),
            places >> _REPLICA_BITS,
            tuple(shared),
            [
                each
                for replicas in believed
                if replicas
                for each, at in replicas.items()
                if now - at < BELIEVED_SECONDS
            ],
        )

    def holders(self, name: str, now: float) -> set[int]:
        """Return the replicas that have a chunk in memory, or are about to."""
        copies = self.copies(name, now)
        return {*copies.replicas[copies.tiers == MEMORY_TIER].tolist(), *copies.believed}

    def key(self, name: str) -> int | None:
        """Return the number of the chunk that some replica knows by this name."""
        return self._keys.get(name)

    def beginners(self, name: str) -> Collection[int]:
        """Return the replicas that were sent a conversation with this beginning, or a text with
        this line."""
        return self._beginnings.get(name, ())

    def report(
        self,
        replica: int,
        chunks: Mapping[str, tuple[int, Iterable[str]]],
        gone: Iterable[str],
        *,
        whole: bool,
    ) -> None:
        """Take a report: by key, a bit for each tier that has a chunk, of which one at most is not
        shared, and the chunk's names; and keys that are gone. ``whole``: the replica has no
        others."""
        mine = self._tiers[replica]
        if whole:
            reported = {int(key, 16) for key in chunks}
            self._remove(replica, [key for key in mine if key not in reported])
        lost = [int(key, 16) for key in gone]
        self._remove(replica, lost)
        for key in lost:
            self._doubt(replica, key)
        for written, (tiers, names) in chunks.items():
            key = int(written, 16)
            if mine.get(key) != tiers:
                self._remove(replica, [key])
                self._add(replica, key, tiers)
            self._doubt(replica, key)
            for name in names:
                self._keys[name] = key
                self._keys.move_to_end(name)
                self._doubt(replica, name)
        while len(self._keys) > MOST_NAMES:
            self._keys.popitem(last=False)

    def believe(self, replica: int, names: Iterable[str], now: float) -> None:
        """Count chunks as resident until a report mentions them."""
        for name in names:
            chunk = self._keys.get(name, name)
            self._believed.setdefault(chunk, {})[replica] = now
            self._believed.move_to_end(chunk)
        while self._believed:
            chunk, since = next(iter(self._believed.items()))
            if now - max(since.values()) < BELIEVED_SECONDS and len(self._believed) < MOST_BELIEVED:
                break
            del self._believed[chunk]

    def begin(self, replica: int, names: Iterable[str]) -> None:
        """Note beginnings of a conversation that is sent to a replica, or lines of its texts."""
        for name in names:
            self._beginnings.setdefault(name, set()).add(replica)
            self._beginnings.move_to_end(name)
        while len(self._beginnings) > KEPT_BEGINNINGS:
            self._beginnings.popitem(last=False)

    def end(self, replica: int, names: Iterable[str]) -> None:
        """Note that a replica has these beginnings no more."""
        for name in names:
            replicas = self._beginnings.get(name)
            if replicas is not None:
                replicas.discard(replica)

    def forget(self, replica: int) -> None:
        """Forget everything that a replica loses when it ends."""
        self._remove(replica, list(self._tiers[replica]))
        for believed in self._believed.values():
            believed.pop(replica, None)
        self._believed = OrderedDict((name, each) for name, each in self._believed.items() if each)
        for replicas in self._beginnings.values():
            replicas.discard(replica)

    def _doubt(self, replica: int, chunk: int | str) -> None:
        """Stop assuming that a replica has a chunk, since it has reported on it."""
        believed = self._believed.get(chunk)
        if believed is not None and believed.pop(replica, None) is not None and not believed:
            del self._believed[chunk]

    def _add(self, replica: int, key: int, tiers: int) -> None:
        self._tiers[replica][key] = tiers
        for tier in _bits(tiers & self._shared_bits):
            self._shared[tier][key] += 1
        for tier in _bits(tiers & ~self._shared_bits):
            number = tier << _REPLICA_BITS | replica
            number = self._numbers.setdefault(number, number)
            self._copies.setdefault(key, set()).add(number)
            self._in_memory[replica] += tier == MEMORY_TIER

    def _remove(self, replica: int, keys: Iterable[int]) -> None:
        for key in keys:
            tiers = self._tiers[replica].pop(key, 0)
            for tier in _bits(tiers & self._shared_bits):
                self._shared[tier][key] -= 1
                if not self._shared[tier][key]:
                    del self._shared[tier][key]
            for tier in _bits(tiers & ~self._shared_bits):
                numbers = self._copies[key]
                numbers.remove(tier << _REPLICA_BITS | replica)
                if not numbers:
                    del self._copies[key]
                self._in_memory[replica] -= tier == MEMORY_TIER


def _bits(number: int) -> Iterable[int]:
    """Return which bits of a number are set."""
    if number == 1:  # most chunks are in memory alone
        return (0,)
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]
