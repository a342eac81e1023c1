"""What a router knows of each replica: which chunks it has, as it reported and as this router's own
requests made it, and how long a request waits there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

BELIEVED_SECONDS = 10.0
"""The seconds for which a chunk counts as resident where a request was sent that wants it: by then,
a report tells."""

KEPT_BEGINNINGS = 10_000
"""The most beginnings of conversations that are remembered of one replica; those used last stay."""

MOST_NAMES = 1_000_000
"""The most names of chunks that a router remembers."""


@dataclass(slots=True)
class Replica:
    """One replica, as a router sees it. ``seconds_per_token``: to compute one that is missing."""

    id: str
    ready: bool = False
    epoch: str | None = None
    number: int = 0
    resident: set[str] = field(default_factory=set)
    """Chunk keys."""

    running: int = 0
    waiting: int = 0
    seconds_per_token: float = 2e-4

    pending: dict[int, float] = field(default_factory=dict)
    """Expected seconds of this router's requests that have no first byte yet, by request."""

    open: int = 0
    """This router's requests under way."""

    reported_open: int = 0
    """Those of them at the time of the last report."""

    believed: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Names of chunks that requests of this router brought there, and when, the latest last."""

    beginnings: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def wait(self, others_seconds: float) -> float:
        """Return the seconds that a request waits here: for this router's own, as far as they are
        expected to take, and for those of others, which take ``others_seconds`` each."""
        others = max(0, self.running + self.waiting - self.reported_open)
        return sum(self.pending.values()) + others * others_seconds

    def has(self, name: str, key: str | None, now: float) -> bool:
        """Return whether a chunk is here, or is on its way."""
        if key is not None and key in self.resident:
            return True
        return now - self.believed.get(name, float("-inf")) < BELIEVED_SECONDS

    def believe(self, names: Collection[str], now: float) -> None:
        """Count chunks as resident until a report can tell."""
        for name in names:
            self.believed[name] = now
            self.believed.move_to_end(name)
        while self.believed and now - next(iter(self.believed.values())) >= BELIEVED_SECONDS:
            self.believed.popitem(last=False)

    def begin(self, names: Collection[str]) -> None:
        """Note the beginnings of a conversation that is answered here."""
        for name in names:
            self.beginnings[name] = None
            self.beginnings.move_to_end(name)
        while len(self.beginnings) > KEPT_BEGINNINGS:
            self.beginnings.popitem(last=False)

    def forget(self) -> None:
        """Forget everything that a replica loses when it ends."""
        self.epoch, self.number = None, 0
        self.resident.clear()
        self.believed.clear()
        self.beginnings.clear()


class NameBook:
    """Remembers the chunk keys of names, which are the same at all replicas."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._keys: OrderedDict[str, str] = OrderedDict()

    def learn(self, resident: Mapping[str, Collection[str]]) -> None:
        """Take the names of chunks from a report."""
        for key, names in resident.items():
            for name in names:
                self._keys[name] = key
                self._keys.move_to_end(name)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def key(self, name: str) -> str | None:
        """Return the key of the chunk with this name; None where no replica has told."""
        return self._keys.get(name)
