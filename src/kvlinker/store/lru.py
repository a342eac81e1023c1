"""The accounting that tiers share: sizes by key, in order of use, under a budget of bytes; pinned keys stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

PINNED_SHARE = 0.8
"""Of a tier's budget: pinned chunks beyond it are evicted like others, so that a small tier stays of use."""


class LruIndex:
    """Keys and their sizes in bytes, in order of use. Not thread safe: the tier's lock guards it."""

    def __init__(self, budget_bytes: int, pinned: Set[str] = frozenset()) -> None:
        if budget_bytes < 0:
            raise ValueError(f"A tier's budget must not be negative, got {budget_bytes} bytes.")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._most_pinned_bytes = int(budget_bytes * PINNED_SHARE)
        self._pinned_bytes = 0
        self._pinned_keys = pinned
        self._evictable: OrderedDict[str, int] = OrderedDict()
        self._pinned: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._evictable or key in self._pinned

    def __len__(self) -> int:
        return len(self._evictable) + len(self._pinned)

    def keys(self) -> tuple[str, ...]:
        """Least recently used first, but pinned ones last."""
        return (*self._evictable, *self._pinned)

    def nbytes(self, key: str) -> int | None:
        return self._evictable.get(key, self._pinned.get(key))

    def set_pinned(self, keys: Set[str]) -> None:
        """Pin these keys and no others, whether they are present or not."""
        present = {*self._pinned, *(keys & self._evictable.keys())}
        changed = [(key, self.nbytes(key) or 0) for key in present if (key in keys) != (key in self._pinned)]
        self._pinned_keys = keys
        for key, nbytes in changed:
            self.remove(key)
            self.add(key, nbytes)

    def touch(self, key: str) -> bool:
        """Make the key the most recently used; False where it is absent."""
        for entries in (self._evictable, self._pinned):
            if key in entries:
                entries.move_to_end(key)
                return True
        return False

    def add(self, key: str, nbytes: int) -> None:
        """Add an absent key as the most recently used. Does not look at the budget: call ``make_room`` first."""
        if key in self._pinned_keys:
            self._pinned[key] = nbytes
            self._pinned_bytes += nbytes
        else:
            self._evictable[key] = nbytes
        self.used_bytes += nbytes

    def remove(self, key: str) -> bool:
        """Forget the key; False where it was absent."""
        nbytes = self._evictable.pop(key, None)
        if nbytes is None:
            nbytes = self._pinned.pop(key, None)
            if nbytes is None:
                return False
            self._pinned_bytes -= nbytes
        self.used_bytes -= nbytes
        return True

    def fits(self, nbytes: int) -> bool:
        """Whether ``make_room`` can make room for them."""
        return nbytes <= self.budget_bytes - min(self._pinned_bytes, self._most_pinned_bytes)

    def make_room(self, nbytes: int) -> list[tuple[str, int]]:
        """Remove keys until ``nbytes`` more fit; returns them with their sizes.

        Least recently used first; of the pinned ones only what exceeds their share of the budget, and that before
        others.
        """
        removed: list[tuple[str, int]] = []
        while self.used_bytes + nbytes > self.budget_bytes:
            if self._pinned_bytes > self._most_pinned_bytes:
                key = next(iter(self._pinned))
            elif self._evictable:
                key = next(iter(self._evictable))
            else:
                break
            removed.append((key, self.nbytes(key) or 0))
            self.remove(key)
        return removed
