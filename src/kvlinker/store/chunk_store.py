"""The chunk store: all tiers seen as one. The engine puts and gets KV here; the server deletes and reports."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Sequence, Set

from kvlinker.events import ChunkLoaded, ChunkLookup, Events
from kvlinker.store.base import Tier, TierCheck, TierUsage
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)

DEFAULT_WRITE_QUEUE_BYTES = 1 << 30
SHARED_TIERS_CLOSE_SECONDS = 10.0


class ChunkStore:
    """Tiers from the fastest to the slowest, with KV written through to all, and again when it is promoted on use: a
    slower tier that has it takes that as a use, one that lost it has it back.

    ``put`` stores into the first tier at once and leaves each slower one to a background thread of its own, so that
    none holds up another. A chunk that waits for such a thread counts as lying in the first tier, and is found there
    even if that tier has no room for it. When more than ``write_queue_bytes`` wait for a tier, it does not get the
    chunk at all: the caller never waits, and a chunk that is then evicted from the others is computed again. Besides
    the tiers' budgets, at most ``write_queue_bytes`` plus two chunks of memory are held for each slower tier.

    All methods may be called from any thread. Listeners of the tiers' events must not call ``delete`` or ``flush``.
    """

    def __init__(
        self, tiers: Sequence[Tier], events: Events, *, write_queue_bytes: int = DEFAULT_WRITE_QUEUE_BYTES
    ) -> None:
        if not tiers:
            raise ValueError("A chunk store needs at least one tier.")
        self._tiers = tuple(tiers)
        self._events = events
        self._writers = {tier.name: BackgroundWriter(tier, write_queue_bytes) for tier in self._tiers[1:]}
        self._lock = threading.RLock()  # makes queueing and the first tier's put one step; guards the two counts
        self._deletes_running = 0
        self._deletes_done = 0
        atexit.register(self.close)

    def get(self, key: str) -> ChunkKV | None:
        """The chunk's KV from the fastest tier that has it, now in the first one too, and soon in the others; None
        where no tier has it.

        The caller must not modify it. Publishes one ChunkLookup, and on a hit one ChunkLoaded.
        """
        epoch = self._delete_epoch()
        started = time.perf_counter()
        for position, tier in enumerate(self._tiers):
            kv = tier.get(key)
            others = self._others(position) if position else ()
            if kv is None and position == 0:
                kv = self._waiting(key)
                others = self._tiers[:1]
            if kv is not None:
                seconds = time.perf_counter() - started
                self._promote(key, kv, others, epoch)
                self._events.publish(ChunkLookup(hit=True, tier=tier.name))
                self._events.publish(ChunkLoaded(tier.name, seconds, kv.nbytes))
                return kv
        self._events.publish(ChunkLookup(hit=False, tier="none"))
        return None

    def put(self, key: str, kv: ChunkKV) -> None:
        """Keep the KV; ``get`` sees it from now on. The caller must not modify it any more."""
        with self._lock:
            self._place(key, kv, self._tiers)

    def tier_of(self, key: str) -> str | None:
        """The name of the fastest tier that has the chunk. Does not count as a use."""
        if self._tiers[0].contains(key) or self._waiting(key) is not None:
            return self._tiers[0].name
        return next((tier.name for tier in self._tiers[1:] if tier.contains(key)), None)

    def nbytes(self, key: str) -> int | None:
        """Bytes of the chunk in the fastest tier that has it. Does not count as a use."""
        waiting = self._waiting(key)
        if waiting is not None:
            return waiting.nbytes
        return next((size for tier in self._tiers if (size := tier.nbytes(key)) is not None), None)

    def keys(self) -> frozenset[str]:
        """The keys of all chunks that the store has."""
        return self._keys(self._tiers)

    def own_keys(self) -> frozenset[str]:
        """The keys of all chunks that lie in tiers of this store alone, or wait to be written."""
        return self._keys([tier for tier in self._tiers if not tier.shared])

    def delete(self, key: str) -> None:
        """Remove the chunk from all tiers. It comes back only by a ``put`` that has not returned before this call.

        Waits for the background threads that are just writing this chunk.
        """
        with self._lock:
            self._deletes_running += 1
        try:
            self._tiers[0].delete(key)
            for writer in self._writers.values():
                writer.cancel(key)
            for tier in self._tiers[1:]:
                tier.delete(key)
        finally:
            with self._lock:
                self._deletes_running -= 1
                self._deletes_done += 1

    def set_pinned(self, keys: Set[str]) -> None:
        """Have the tiers evict none of these keys, and all others as usual; see ``Tier.set_pinned``."""
        for tier in self._tiers:
            tier.set_pinned(keys)

    @property
    def largest_budget_bytes(self) -> int:
        """The budget of the tier of this store alone that has the largest."""
        return max((tier.budget_bytes for tier in self._tiers if not tier.shared), default=0)

    def usage_of(self, keys: Set[str]) -> tuple[TierUsage, ...]:
        """What these chunks take up in each tier of this store alone, from the fastest to the slowest; takes time for
        many."""
        usages = []
        for tier in (tier for tier in self._tiers if not tier.shared):
            sizes = [tier.nbytes(key) or 0 for key in keys & set(tier.keys())]
            usages.append(TierUsage(tier.name, sum(sizes), tier.budget_bytes, len(sizes)))
        return tuple(usages)

    def usage(self) -> tuple[TierUsage, ...]:
        """How full each tier is, from the fastest to the slowest."""
        return tuple(TierUsage(tier.name, tier.used_bytes, tier.budget_bytes, len(tier)) for tier in self._tiers)

    def check(self) -> tuple[TierCheck, ...]:
        """Read and verify every stored copy, dropping the damaged ones; one result per tier."""
        return tuple(tier.check() for tier in self._tiers)

    def flush(self) -> None:
        """Wait until every put so far has reached, or been refused by, the slower tiers."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Finish the writes under way, those to shared tiers only as far as that takes a few seconds, and close the
        tiers. Runs at interpreter exit if nobody calls it. Idempotent."""
        atexit.unregister(self.close)
        deadline = time.monotonic() + SHARED_TIERS_CLOSE_SECONDS
        for tier in self._tiers[1:]:
            self._writers[tier.name].close(deadline if tier.shared else None)
        for tier in self._tiers:
            tier.close()

    def _place(self, key: str, kv: ChunkKV, tiers: Sequence[Tier]) -> None:
        """Store into the first of the tiers, the store's first, now, and into the rest later; the lock is held."""
        for tier in tiers[1:]:
            if not self._writers[tier.name].add(key, kv):
                logger.warning("Chunk %s stays out of the slower tier %s: too many writes wait already", key, tier.name)
        tiers[0].put(key, kv)

    def _others(self, position: int) -> Sequence[Tier]:
        return self._tiers[:position] + self._tiers[position + 1 :]

    def _waiting(self, key: str) -> ChunkKV | None:
        return next((kv for writer in self._writers.values() if (kv := writer.get(key)) is not None), None)

    def _keys(self, tiers: Sequence[Tier]) -> frozenset[str]:
        waiting = [writer.keys() for writer in self._writers.values()]
        return frozenset().union(*waiting, *(tier.keys() for tier in tiers))

    def _delete_epoch(self) -> int | None:
        """Names the time between two deletes; None during one."""
        with self._lock:
            return None if self._deletes_running else self._deletes_done

    def _promote(self, key: str, kv: ChunkKV, tiers: Sequence[Tier], epoch: int | None) -> None:
        """Store what was just loaded into other tiers, unless a delete came in between: it must not undo that."""
        with self._lock:
            if tiers and epoch is not None and epoch == self._delete_epoch():
                self._place(key, kv, tiers)
