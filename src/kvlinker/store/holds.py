"""Holds chunks in memory while requests use them: they are not evicted, and chunks in use fit into
the budget."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class HoldingTier(Protocol):
    """A tier in memory, whose chunks requests use in place."""

    @property
    def budget_bytes(self) -> int: ...

    def hold(self, key: str) -> None:
        """Keep the key, present or not, from eviction until it is released."""

    def release(self, key: str) -> None:
        """Allow the key's eviction again."""


class Holds:
    """Counts the requests that use each chunk. Any thread may call the methods of this and of each
    ``Hold``."""

    def __init__(self, tiers: Sequence[HoldingTier]) -> None:
        """``tiers`` are those in memory; the smallest budget limits the chunks in use."""
        self._tiers = tuple(tiers)
        self._lock = threading.Lock()
        self._uses: Counter[str] = Counter()
        self._nbytes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all chunks in use, each counted once."""
        with self._lock:
            return sum(self._nbytes.values())

    def awaited_bytes(self, has: Callable[[str], bool]) -> int:
        """Return the bytes of the chunks in use that memory does not have yet; ``has`` returns
        whether it has a chunk."""
        with self._lock:
            return sum(nbytes for key, nbytes in self._nbytes.items() if not has(key))

    def take(self, sizes: Mapping[str, int]) -> Hold | None:
        """Hold these chunks, of so many bytes each, whether they are in memory or are going to be;
        None if the chunks in use would exceed the budget. If none is in use, even chunks that
        exceed it alone are held."""
        with self._lock:
            more = sum(nbytes for key, nbytes in sizes.items() if key not in self._uses)
            used = sum(self._nbytes.values())
            if sizes and used and used + more > min(tier.budget_bytes for tier in self._tiers):
                return None
            hold = Hold(self)
            self._extend(hold, sizes)
            return hold

    def extend(self, hold: Hold, sizes: Mapping[str, int]) -> None:
        """Hold more chunks for the same request, whatever the budget; do nothing if ``hold`` is
        released."""
        with self._lock:
            if hold.users:
                self._extend(hold, sizes)

    def share(self, hold: Hold) -> None:
        """Have ``hold`` last until it is released once more."""
        with self._lock:
            assert hold.users, "a released hold cannot be shared"
            hold.users += 1

    def release(self, hold: Hold) -> None:
        """Give up the chunks, if ``hold`` is not shared."""
        with self._lock:
            assert hold.users, "a hold was released more often than shared"
            hold.users -= 1
            if hold.users:
                return
            for key in hold.keys:
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._uses[key], self._nbytes[key]
                    for tier in self._tiers:
                        tier.release(key)
            hold.keys.clear()

    def _extend(self, hold: Hold, sizes: Mapping[str, int]) -> None:
        for key in sizes.keys() - hold.keys:
            hold.keys.add(key)
            self._uses[key] += 1
            if self._uses[key] == 1:
                self._nbytes[key] = sizes[key]
                for tier in self._tiers:
                    tier.hold(key)


class Hold:
    """The chunks that one request uses, until it is released."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self.keys: set[str] = set()
        self.users = 1

    def extend(self, sizes: Mapping[str, int]) -> None:
        """Hold these chunks too, of so many bytes each; do nothing if this is released."""
        self._holds.extend(self, sizes)

    def share(self) -> Hold:
        """Return this hold, which has to be released once more now."""
        self._holds.share(self)
        return self

    def release(self) -> None:
        """Give up the chunks, if they are not shared."""
        self._holds.release(self)
