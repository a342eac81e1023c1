"""Accounts for the chunks of a tier: sizes by key under a budget, in the order of their eviction;
pinned keys stay, and so do held ones, which are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from sortedcontainers import SortedDict

from kvlinker.base.types.chunks import Eviction
from kvlinker.store.next_uses import MOST_COMPARED, NextUses

PINNED_SHARE = 0.8
"""The share of a tier's budget that pinned chunks may keep. Beyond it they are evicted like others,
so that a small tier remains useful."""

LEAST_SHARE = 1 / 16
"""The least share of a chunk that a use counts as computing again; smaller shares count as this
one."""

MOST_REUSE = 256.0
"""The most that uses can add up to, so that a chunk that was once used very often can still be
evicted later."""


def use_weight(recomputed: float) -> float:
    """Return the addend of a use to a chunk's reuse frequency f_r: 1 / ``recomputed``, from 1 to 1
    / LEAST_SHARE.

    ``recomputed`` is the share of the chunk's tokens that the use computes again; under Cache-Craft
    the CFO (section 3.3).
    """
    return 1 / min(1.0, max(recomputed, LEAST_SHARE))


class EvictionOrder(Protocol):
    """Orders keys for eviction: those of the lowest priority go first, of equal ones the least
    recently used."""

    def priority(self, reuse: float) -> float:
        """Return the priority of a key that is used now, and whose uses add up to ``reuse``."""

    def evicted(self, priority: float) -> None:
        """Note that a key of this priority, the lowest, made room."""


class LeastRecentlyUsed:
    """Orders keys by recency alone."""

    def priority(self, reuse: float) -> float:
        return 0.0

    def evicted(self, priority: float) -> None:
        """Do nothing: all priorities are equal."""


class LeastReused:
    """Orders keys by Cache-Craft's reuse frequency f_r, with LFU's dynamic ageing (Arlitt et al.,
    "Evaluating content management techniques for Web proxy caches", 2000).

    A key's priority is f_r plus the age at its last use, and the age is the priority of the last
    evicted key. Without ageing, newcomers would evict each other while unused keys stayed. f_r is
    not divided by the size: both the savings of a use and the size grow with the chunk's tokens.
    """

    def __init__(self) -> None:
        self._age = 0.0

    def priority(self, reuse: float) -> float:
        return self._age + reuse

    def evicted(self, priority: float) -> None:
        self._age = max(self._age, priority)


_ORDERS: Mapping[Eviction, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "reuse": LeastReused,
}


@dataclass(slots=True)
class _Entry:
    """A key's size and uses."""

    nbytes: int
    reuse: float
    """The sum of the weights of its uses."""
    rank: tuple[float, int]
    """The priority and the time of the last use; the lowest is evicted first."""


class EvictionIndex:
    """Keeps keys and their sizes in bytes in the order of their eviction. Not thread safe: the
    tier's lock guards it.

    A key enters as if it had been used once by a request that computed all of it. Each step takes
    O(log n). Held keys are never evicted, and may take more than the budget.
    """

    def __init__(
        self,
        budget_bytes: int,
        pinned: Set[str] = frozenset(),
        eviction: Eviction = "lru",
        next_uses: NextUses | None = None,
    ) -> None:
        """``next_uses`` says which chunks of an owner are needed last."""
        if budget_bytes < 0:
            raise ValueError(f"A tier's budget must not be negative, got {budget_bytes} bytes.")
        self.set_budget(budget_bytes)
        self.used_bytes = 0
        self._order = _ORDERS[eviction]()
        self._next_uses = next_uses
        self._uses = 0
        self._pinned_bytes = 0
        self._pinned_keys = frozenset(pinned)
        self._held_keys: set[str] = set()
        self._held_bytes = 0
        self._entries: dict[str, _Entry] = {}
        self._evictable: MutableMapping[tuple[float, int], str] = SortedDict()
        self._pinned: MutableMapping[tuple[float, int], str] = SortedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Call ``make_room(0)`` then: what is there may take more than it."""
        self.budget_bytes = budget_bytes
        self._most_pinned_bytes = int(budget_bytes * PINNED_SHARE)

    def keys(self) -> tuple[str, ...]:
        """Return all keys, the next to be evicted first, but pinned ones last, and held ones after
        these."""
        held = sorted(
            self._held_keys & self._entries.keys(), key=lambda key: self._entries[key].rank
        )
        return (*self._evictable.values(), *self._pinned.values(), *held)

    def nbytes(self, key: str) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.nbytes

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the bytes of those of the keys that are present."""
        return {key: entry.nbytes for key in keys if (entry := self._entries.get(key)) is not None}

    def set_pinned(self, keys: Set[str]) -> None:
        """Pin these keys and no others, whether they are present or not."""
        keys = frozenset(keys)
        changed = [
            (key, self._taken(key)) for key in keys ^ self._pinned_keys if key in self._entries
        ]
        self._pinned_keys = keys
        for key, entry in changed:
            self._enter(key, entry)

    def is_held(self, key: str) -> bool:
        """Return whether the key is held, present or not."""
        return key in self._held_keys

    def hold(self, key: str) -> None:
        """Keep the key, present or not, from eviction until it is released."""
        self._set_held(key, held=True)

    def release(self, key: str) -> None:
        """Allow the key's eviction again. Call ``make_room(0)`` then: held keys may have taken more
        than the budget."""
        self._set_held(key, held=False)

    def touch(self, key: str, weight: float = 0.0) -> bool:
        """Note a use, now the last one, that adds ``weight`` to the sum of the key's uses; returns
        False if it is absent."""
        if key not in self._entries:
            return False
        entry = self._taken(key)
        self._enter(key, self._used(entry.nbytes, min(entry.reuse + weight, MOST_REUSE)))
        return True

    def add(self, key: str, nbytes: int) -> None:
        """Add an absent key, now used last. Does not look at the budget: call ``make_room``
        first."""
        self._enter(key, self._used(nbytes, use_weight(1.0)))

    def fill(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Add all of these, in this order, to an index that is empty; quicker than one by one."""
        assert not self._entries
        once = use_weight(1.0)
        priority = self._order.priority(once)
        self._entries = {
            key: _Entry(nbytes, once, (priority, use)) for use, (key, nbytes) in enumerate(sizes, 1)
        }
        self._uses = len(self._entries)
        assert not self._held_keys
        pinned = {self._entries[key].rank: key for key in self._pinned_keys & self._entries.keys()}
        self._pinned.update(pinned)
        self._evictable.update(
            (entry.rank, key) for key, entry in self._entries.items() if entry.rank not in pinned
        )
        self.used_bytes = sum(entry.nbytes for entry in self._entries.values())
        self._pinned_bytes = sum(self._entries[key].nbytes for key in pinned.values())

    def remove(self, key: str) -> bool:
        """Forget the key; returns False if it was absent."""
        if key not in self._entries:
            return False
        self._taken(key)
        return True

    def fits(self, nbytes: int) -> bool:
        """Return whether ``make_room`` can make room for so many bytes."""
        kept = self._held_bytes + min(self._pinned_bytes, self._most_pinned_bytes)
        return nbytes <= self.budget_bytes - kept

    def make_room(self, nbytes: int) -> list[tuple[str, int]]:
        """Remove keys until ``nbytes`` more fit; returns them with their sizes.

        In the order of eviction, but of each owner's keys those that are needed last. Pinned ones
        go before others as far as they exceed their share of the budget, and after them if held
        ones need the room. Held ones stay, even if too little fits then.
        """
        removed: list[tuple[str, int]] = []
        while self.used_bytes + nbytes > self.budget_bytes:
            if self._evictable and self._pinned_bytes <= self._most_pinned_bytes:
                (priority, _), key = next(iter(self._evictable.items()))
                self._order.evicted(priority)
                if self._next_uses is not None:
                    key = self._next_uses.needed_last(self._next())
            elif self._pinned:
                key = next(iter(self._pinned.values()))
            else:
                break
            removed.append((key, self._taken(key).nbytes))
        return removed

    def make_room_for(self, key: str, nbytes: int) -> list[tuple[str, int]] | None:
        """Remove keys of the owner of ``key``, which is absent and expected, that are needed later,
        until ``nbytes`` more fit; returns them with their sizes. None, and nothing is removed,
        where that is not enough."""
        lacking = self.used_bytes + nbytes - self.budget_bytes
        removed: list[str] = []
        if lacking > 0 and self._next_uses is not None:
            for other in self._next_uses.needed_later(key, self._next()):
                removed.append(other)
                lacking -= self._entries[other].nbytes
                if lacking <= 0:
                    break
        return None if lacking > 0 else [(other, self._taken(other).nbytes) for other in removed]

    def _next(self) -> Iterable[str]:
        """Return the keys that are evicted next."""
        return islice(self._evictable.values(), MOST_COMPARED)

    def _set_held(self, key: str, *, held: bool) -> None:
        entry = self._taken(key) if key in self._entries else None
        if held:
            self._held_keys.add(key)
        else:
            self._held_keys.discard(key)
        if entry is not None:
            self._enter(key, entry)

    def _used(self, nbytes: int, reuse: float) -> _Entry:
        """Return the entry of a key that is used now."""
        self._uses += 1
        return _Entry(nbytes, reuse, (self._order.priority(reuse), self._uses))

    def _enter(self, key: str, entry: _Entry) -> None:
        self._entries[key] = entry
        self.used_bytes += entry.nbytes
        if key in self._held_keys:
            self._held_bytes += entry.nbytes
        elif key in self._pinned_keys:
            self._pinned[entry.rank] = key
            self._pinned_bytes += entry.nbytes
        else:
            self._evictable[entry.rank] = key

    def _taken(self, key: str) -> _Entry:
        """Remove a present key; returns its entry."""
        entry = self._entries.pop(key)
        self.used_bytes -= entry.nbytes
        if key in self._held_keys:
            self._held_bytes -= entry.nbytes
        elif key in self._pinned_keys:
            del self._pinned[entry.rank]
            self._pinned_bytes -= entry.nbytes
        else:
            del self._evictable[entry.rank]
        return entry
