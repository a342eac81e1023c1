"""Holds chunks in memory while requests use them: they are not evicted, and chunks in use fit into
the budget."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvlinker.store.tiers.host import HostTier


class Holds:
    """Counts the requests that use each chunk. Any thread may call the methods of this and of each
    ``Hold``."""

    def __init__(self, tiers: Sequence[HostTier]) -> None:
        """``tiers`` are those in memory; the smallest budget limits the chunks in use."""
        self._tiers = tuple(tiers)
        self.lock = threading.Lock()
        """Guards the counts here and those of each ``Hold``."""

        self._uses: Counter[str] = Counter()
        self._nbytes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all chunks in use, each counted once."""
        with self.lock:
            return sum(self._nbytes.values())

    def awaited_bytes(self, has: Callable[[str], bool]) -> int:
        """Return the bytes of the chunks in use that memory does not have yet; ``has`` returns
        whether it has a chunk."""
        with self.lock:
            return sum(nbytes for key, nbytes in self._nbytes.items() if not has(key))

    def take(self, sizes: Mapping[str, int]) -> Hold | None:
        """Hold these chunks, whose bytes are ``sizes``, in memory or on their way there; None if
        the chunks in use would exceed the budget. If none is in use, even chunks that exceed it
        alone are held."""
        with self.lock:
            more = sum(nbytes for key, nbytes in sizes.items() if key not in self._uses)
            used = sum(self._nbytes.values())
            if sizes and used and used + more > min(tier.budget_bytes for tier in self._tiers):
                return None
            return Hold(self, sizes)

    def begin(self, keys: Iterable[str], sizes: Mapping[str, int]) -> None:
        """Count one more request for each of the keys; the lock is held."""
        for key in keys:
            self._uses[key] += 1
            if self._uses[key] == 1:
                self._nbytes[key] = sizes[key]
                for tier in self._tiers:
                    tier.hold(key)

    def end(self, keys: Iterable[str]) -> None:
        """Count one request less for each of the keys; the lock is held."""
        for key in keys:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._nbytes[key]
                for tier in self._tiers:
                    tier.release(key)


class Hold:
    """The chunks that one request uses, until it is released."""

    def __init__(self, holds: Holds, sizes: Mapping[str, int]) -> None:
        """Hold these chunks; the lock is held."""
        self._holds = holds
        self.keys = set(sizes)
        self.users = 1
        holds.begin(sizes, sizes)

    def extend(self, sizes: Mapping[str, int]) -> None:
        """Hold these chunks too, whose bytes are ``sizes``, also beyond the budget. Does nothing
        after the release."""
        with self._holds.lock:
            if self.users:
                self._holds.begin(sizes.keys() - self.keys, sizes)
                self.keys |= sizes.keys()

    def share(self) -> Hold:
        """Return this hold, which has to be released once more now."""
        with self._holds.lock:
            assert self.users, "a released hold cannot be shared"
            self.users += 1
        return self

    def release(self) -> None:
        """Release the chunks, unless another holder shares this hold."""
        with self._holds.lock:
            assert self.users, "a hold was released more often than shared"
            self.users -= 1
            if not self.users:
                self._holds.end(self.keys)
                self.keys.clear()
