"""Where chunks are: an index from each chunk to the replicas that have it, as they reported, and as
this router's own requests made it. Replicas are numbers here."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping

BELIEVED_SECONDS = 10.0
"""The seconds for which a chunk counts as resident where a request was sent that wants it: by then,
a report tells."""

MOST_BELIEVED = 1_000_000
"""The most names of chunks that are believed at a time."""

KEPT_BEGINNINGS = 1_000_000
"""The most beginnings of conversations that are remembered; those used last stay."""

MOST_NAMES = 4_000_000
"""The most names of chunks that are remembered."""


class ResidencyIndex:
    """Finds the replicas that have a chunk, by its name."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, int] = OrderedDict()  # by name
        self._holders: defaultdict[int, set[int]] = defaultdict(set)  # by key
        self._resident: defaultdict[int, set[int]] = defaultdict(set)  # keys, by replica
        self._believed: OrderedDict[str, dict[int, float]] = OrderedDict()  # since when, by name
        self._beginnings: OrderedDict[str, set[int]] = OrderedDict()  # by name

    def count(self, replica: int) -> int:
        """Return how many chunks a replica has reported."""
        return len(self._resident[replica])

    def holders(self, name: str, now: float) -> set[int]:
        """Return the replicas that have a chunk, or are about to."""
        key = self._keys.get(name)
        found = set() if key is None else self._holders.get(key, set())
        believed = self._believed.get(name)
        if not believed:
            return found
        return found | {each for each, at in believed.items() if now - at < BELIEVED_SECONDS}

    def beginners(self, name: str) -> Collection[int]:
        """Return the replicas that were sent a conversation with this beginning."""
        return self._beginnings.get(name, ())

    def report(
        self,
        replica: int,
        resident: Mapping[str, Iterable[str]],
        gone: Iterable[str],
        *,
        whole: bool,
    ) -> None:
        """Take a report: names of chunks by key, and keys that are gone; ``whole``: the replica has
        no others."""
        if whole:
            self._remove(replica, list(self._resident[replica]))
        self._remove(replica, map(_number, gone))
        mine = self._resident[replica]
        for key, names in resident.items():
            number = _number(key)
            mine.add(number)
            self._holders[number].add(replica)
            for name in names:
                self._keys[name] = number
                self._keys.move_to_end(name)
        while len(self._keys) > MOST_NAMES:
            self._keys.popitem(last=False)

    def believe(self, replica: int, names: Iterable[str], now: float) -> None:
        """Count chunks as resident until a report can tell."""
        for name in names:
            self._believed.setdefault(name, {})[replica] = now
            self._believed.move_to_end(name)
        while self._believed:
            name, since = next(iter(self._believed.items()))
            if now - max(since.values()) < BELIEVED_SECONDS and len(self._believed) < MOST_BELIEVED:
                break
            del self._believed[name]

    def begin(self, replica: int, names: Iterable[str]) -> None:
        """Note the beginnings of a conversation that is answered by a replica."""
        for name in names:
            self._beginnings.setdefault(name, set()).add(replica)
            self._beginnings.move_to_end(name)
        while len(self._beginnings) > KEPT_BEGINNINGS:
            self._beginnings.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget everything that a replica loses when it ends."""
        self._remove(replica, list(self._resident[replica]))
        for believed in self._believed.values():
            believed.pop(replica, None)
        self._believed = OrderedDict((name, each) for name, each in self._believed.items() if each)
        for replicas in self._beginnings.values():
            replicas.discard(replica)

    def _remove(self, replica: int, keys: Iterable[int]) -> None:
        mine = self._resident[replica]
        for key in keys:
            mine.discard(key)
            holders = self._holders.get(key)
            if holders is not None:
                holders.discard(replica)
                if not holders:
                    del self._holders[key]


def _number(key: str) -> int:
    """Return the first 64 bits of a chunk key: a number takes a third of the memory."""
    return int(key[:16], 16)
