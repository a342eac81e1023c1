"""The accounting that tiers share: sizes by key, in order of use, under a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict


class LruIndex:
    """Keys and their sizes in bytes, least recently used first. Not thread safe: the tier's lock guards it."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"A tier's budget must not be negative, got {budget_bytes} bytes.")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def keys(self) -> tuple[str, ...]:
        """Least recently used first."""
        return tuple(self._sizes)

    def nbytes(self, key: str) -> int | None:
        return self._sizes.get(key)

    def touch(self, key: str) -> bool:
        """Make the key the most recently used; False where it is absent."""
        if key not in self._sizes:
            return False
        self._sizes.move_to_end(key)
        return True

    def add(self, key: str, nbytes: int) -> None:
        """Add an absent key as the most recently used. Does not look at the budget: call ``make_room`` first."""
        self._sizes[key] = nbytes
        self.used_bytes += nbytes

    def remove(self, key: str) -> bool:
        """Forget the key; False where it was absent."""
        nbytes = self._sizes.pop(key, None)
        if nbytes is None:
            return False
        self.used_bytes -= nbytes
        return True

    def make_room(self, nbytes: int) -> list[tuple[str, int]]:
        """Remove the least recently used keys until ``nbytes`` more fit; returns them with their sizes."""
        removed = []
        while self._sizes and self.used_bytes + nbytes > self.budget_bytes:
            key, size = self._sizes.popitem(last=False)
            self.used_bytes -= size
            removed.append((key, size))
        return removed
