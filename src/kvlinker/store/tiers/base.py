"""The interface of a tier: one place that keeps chunks within a budget of bytes; and what the tiers
of one server alone have in common."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from kvlinker.base.events import ChunkDamaged
from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.store.chunk_kv import ChunkKV, ChunkReader
from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.throttle import Rest, no_rest

UNKNOWN_BUDGET = 1 << 60
"""The budget, in bytes, of a tier whose limit is not known: more than any medium has."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The fill level of a tier, in bytes and chunks."""

    name: str
    used_bytes: int
    budget_bytes: int
    chunks: int
    reachable: bool = True
    """False if the tier does not answer, and nothing was counted."""


@dataclass(frozen=True, slots=True)
class TierCheck:
    """The result of ``Tier.check``."""

    name: str
    checked: int
    """The number of copies that were read."""
    damaged: tuple[ChunkDamaged, ...]
    """The copies that were damaged and are gone now."""
    reachable: bool = True
    """False if the tier does not answer, so that copies were not read."""

    @classmethod
    def of(cls, name: str, results: Iterable[object]) -> TierCheck:
        """Count the results of reading copies one after another. What is not damage is let go of at
        once: a tier may hold more than memory does."""
        checked = 0
        damaged = []
        for result in results:
            checked += 1
            if isinstance(result, ChunkDamaged):
                damaged.append(result)
        return cls(name, checked, tuple(damaged))


class Tier(Protocol):
    """Keeps chunk caches under their chunk keys (``chunk_key`` in hexadecimal), and evicts the
    least used first: least recently, or, for the tiers of one server alone, by what uses add up to
    (``store/eviction.py``).

    A key names its content: all KV ever put under one key is interchangeable, but not all has
    scores. A tier is a cache, so any chunk may be gone at any time, and no method raises because a
    medium fails: a failed write was not stored, a damaged or unreadable copy is a miss. The tier
    publishes ``ChunkEvicted`` and ``ChunkDamaged`` itself.

    All methods may be called from any thread. None of them waits for another thread's bulk reads or
    writes.
    """

    @property
    def name(self) -> str:
        """The name in events and figures, such as "host" or "disk"."""

    @property
    def speed_name(self) -> str:
        """The name under which its bandwidth is remembered; it contains everything that the
        bandwidth depends on (see ``bandwidths.speed_name``)."""

    @property
    def shared(self) -> bool:
        """True if other servers keep chunks here, which this one's catalog does not know."""

    @property
    def budget_bytes(self) -> int:
        """The bytes that ``used_bytes`` never exceeds. A shared tier's budget is approximate: other
        servers write there too."""

    @property
    def used_bytes(self) -> int:
        """The sum of ``nbytes(key)`` over ``keys()``. A shared tier may include others' data."""

    def get(self, key: str) -> ChunkKV | None:
        """Return the chunk's KV, now the most recently used, or None. The caller must not modify
        it."""

    def open(self, key: str) -> ChunkReader | None:
        """Open the chunk's KV, now the most recently used, to be read layer by layer; None if it is
        absent.

        The caller closes the reader. A copy that turns out damaged while it is read is dropped as
        ``get`` would drop it.
        """

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        """Keep the KV, evicting the least used chunks for it; returns whether the tier now holds
        the key.

        False: larger than the budget without pinned chunks (then nothing is evicted), or the medium
        failed. A key that is held already only becomes the most recently used. ``rest`` is called
        between pieces of work.
        """

    def note_use(self, key: str, weight: float) -> None:
        """Note that a request has used the chunk, wherever its KV came from; ``weight`` is that of
        ``eviction.use_weight``.

        Absent keys do not count, and shared tiers may ignore the call.
        """

    def set_pinned(self, keys: Set[str]) -> None:
        """Pin these keys and unpin all others: pinned keys are evicted only while they take more
        than ``eviction.PINNED_SHARE`` of the budget, or if chunks in use need the room. Absent keys
        count once they are put. ``delete`` ignores pins, and shared tiers may ignore the call."""

    def contains(self, key: str) -> bool:
        """Return whether ``get`` would find a copy to read. Does not count as a use."""

    def delete(self, key: str) -> bool:
        """Forget the key; an absent key is no error.

        Returns False if the medium has not let go of its bytes yet: the chunk is tombstoned, so
        that it is not found any more; the tier tries that again, and so may the caller.
        """

    def keys(self) -> tuple[str, ...]:
        """Return the keys held, in the order of eviction. Pinned keys come last. A shared tier may
        not know the order."""

    def __len__(self) -> int:
        """Return the number of chunks held. A shared tier may include others' data."""

    def nbytes(self, key: str) -> int | None:
        """Return the bytes that the chunk takes up here, or None if it is absent. Does not count as
        a use."""

    def sizes(self, keys: Iterable[str]) -> dict[str, int] | None:
        """Return ``nbytes`` of those of the keys that the tier knows of; None if the medium does
        not answer.

        Calls the medium rarely, so that recent chunks of other processes may be missing.
        """

    def check(self) -> TierCheck:
        """Read every copy as ``get`` would, without counting as a use; damaged ones are removed and
        reported."""

    def close(self) -> None:
        """Release memory and handles; a persistent tier's chunks stay. Idempotent."""


class LocalTier:
    """Counts the chunks of a tier that other servers do not use, in the order of their eviction."""

    shared = False

    def __init__(self, name: str, index: EvictionIndex) -> None:
        self.name = name
        self._lock = threading.RLock()  # guards the index
        self._index = index

    @property
    def budget_bytes(self) -> int:
        return self._index.budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    def note_use(self, key: str, weight: float) -> None:
        with self._lock:
            self._index.touch(key, weight)

    def set_pinned(self, keys: Set[str]) -> None:
        with self._lock:
            self._index.set_pinned(keys)

    def keys(self) -> tuple[str, ...]:
        with self._lock:
            return self._index.keys()

    def __len__(self) -> int:
        return len(self._index)

    def nbytes(self, key: str) -> int | None:
        return self._index.nbytes(key)

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        with self._lock:
            return self._index.sizes(keys)


def check_key(key: str) -> str:
    """Return ``key``. Raises ValueError unless it is a chunk key, since that is a caller's
    mistake."""
    if not CHUNK_KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a chunk key: 64 lowercase hexadecimal characters.")
    return key


def lacks_scores(tier: Tier, key: str) -> bool:
    """Return whether the tier has a copy of the chunk without scores, or without sensitivity among
    them. Reads the copy's header, and counts as a use."""
    reader = tier.open(key)
    if reader is None:
        return False
    with closing(reader):
        return reader.scores is None or reader.scores.sensitivity is None
