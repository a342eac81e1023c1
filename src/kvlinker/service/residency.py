"""Reports to routers which chunks this server has, in memory or in slower tiers, by the names that
requests use."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvlinker.base.events import ChunkNamed, Event
from kvlinker.base.types.residency import MEMORY, KnownChunk, ResidencyReport, TierCost
from kvlinker.store import ChunkStore

COSTED_TOKENS = 512
"""The length of the chunk whose loading, or computation, is reported per token."""

MOST_NAMED = 100_000
"""The most chunks whose names are remembered; those named last stay."""

NAMES_PER_CHUNK = 24
"""The most names of one chunk; older ones go."""

KEPT_CHANGES = 100
"""The reports to which a router may refer back; one that knows less gets everything."""

MOST_REPORTED = 20_000
"""The most chunks that are reported of each tier that is slower than memory."""

MOST_LOOKED_UP = 10_000
"""The most chunks that are looked up in shared tiers: those named last."""

LOOK_SECONDS = 30.0
"""The seconds between two looks at shared tiers, where others write and evict."""


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of one report since the previous one."""

    chunks: dict[str, KnownChunk]
    gone: frozenset[str]


class Residency:
    """Follows the contents of the tiers. Methods may be called from any thread."""

    def __init__(
        self,
        store: ChunkStore,
        *,
        kv_bytes: Callable[[int], int],
        resident_keys: Callable[[], frozenset[str]] = frozenset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kv_bytes`` returns the stored bytes of a chunk by its number of tokens;
        ``resident_keys`` returns the chunks that the engine has in memory of its own."""
        self._store = store
        self._resident_keys = resident_keys
        self._kv_bytes = kv_bytes
        self._clock = clock
        self._looking = threading.Lock()  # held by the thread that looks at shared tiers
        self._look_at = float("-inf")
        self._lock = threading.Lock()  # guards everything below
        self._shared: Mapping[str, frozenset[str]] = {}  # keys, by tier
        self._epoch = secrets.token_hex(8)
        self._number = 0
        self._names: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()  # by chunk key
        self._reported: dict[str, KnownChunk] = {}
        self._changes: deque[_Change] = deque(maxlen=KEPT_CHANGES)

    def listen(self, event: Event) -> None:
        """Take note of an event; ``Events.subscribe`` takes this."""
        if isinstance(event, ChunkNamed):
            with self._lock:
                names = self._names.setdefault(event.chunk_key, OrderedDict())
                for name in event.names:
                    names[name] = None
                    names.move_to_end(name)
                while len(names) > NAMES_PER_CHUNK:
                    names.popitem(last=False)
                self._names.move_to_end(event.chunk_key)
                if len(self._names) > MOST_NAMED:
                    self._names.popitem(last=False)

    def costs(self) -> dict[str, TierCost]:
        """Return the cost of loading from each slower tier, by the bandwidths measured last, per
        token of a chunk of ``COSTED_TOKENS``."""
        costs, places = {}, self._store.places()
        nbytes = self._kv_bytes(COSTED_TOKENS)
        for tier in self._store.slower_tiers():
            taken = self._store.bandwidths.time([(tier.name, nbytes)])
            place = places[tier.name] if tier.shared else None
            costs[tier.name] = TierCost(
                None if taken is None else taken.seconds / COSTED_TOKENS, place
            )
        return costs

    def report(self, epoch: str | None = None, after: int = 0) -> ResidencyReport:
        """Return the changes since report ``after`` of ``epoch``; everything, where that is another
        run's, or too long ago."""
        self._look_at_shared_tiers()
        own = self._store.own_places(limit=MOST_REPORTED)
        own |= dict.fromkeys(self._resident_keys() & own.keys(), MEMORY)
        with self._lock:
            now = self._known(own)
            changed = {key: chunk for key, chunk in now.items() if self._reported.get(key) != chunk}
            gone = self._reported.keys() - now.keys()
            if changed or gone:
                self._number += 1
                self._changes.append(_Change(changed, frozenset(gone)))
                self._reported = now
            missed = self._number - after
            if epoch != self._epoch or not 0 <= missed <= len(self._changes):
                return ResidencyReport(self._epoch, self._number, True, self._reported, ())
            chunks: dict[str, KnownChunk] = {}
            removed: set[str] = set()
            for change in list(self._changes)[len(self._changes) - missed :]:
                chunks = {key: each for key, each in chunks.items() if key not in change.gone}
                chunks |= change.chunks
                removed = (removed | change.gone) - change.chunks.keys()
            return ResidencyReport(self._epoch, self._number, False, chunks, tuple(sorted(removed)))

    def _known(self, own: Mapping[str, str]) -> dict[str, KnownChunk]:
        """Return all chunks to report; the lock is held."""
        known = {}
        for key in own.keys() | frozenset().union(*self._shared.values()):
            tiers = [own[key]] if key in own else []
            tiers += [name for name, keys in self._shared.items() if key in keys]
            known[key] = KnownChunk(tuple(tiers), tuple(self._names.get(key, ())))
        return known

    def _look_at_shared_tiers(self) -> None:
        """Ask shared tiers which of the chunks named last they have, where the last look is old; of
        a tier that does not answer, nothing is known."""
        if self._clock() < self._look_at or not self._looking.acquire(blocking=False):
            return
        try:
            with self._lock:
                keys = frozenset(islice(reversed(self._names), MOST_LOOKED_UP))
            shared = {
                tier.name: frozenset(tier.sizes(keys) or ())
                for tier in self._store.slower_tiers()
                if tier.shared
            }
            self._look_at = self._clock() + LOOK_SECONDS
            with self._lock:
                self._shared = shared
        finally:
            self._looking.release()
