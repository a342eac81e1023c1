"""Accounts for the chunks of a tier: sizes by key under a budget, in the order of their eviction;
pinned keys stay, and so do held ones, which are in use."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Set
from dataclasses import dataclass
from itertools import chain, islice

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


@dataclass(slots=True)
class _Entry:
    """A key's size and uses."""

    nbytes: int
    reuse: float
    """The sum of the weights of its uses."""
    rank: tuple[float, int]
    """The priority and the time of the last use; the lowest is evicted first."""


class _Group:
    """Keys that are evicted alike, by rank, and the sum of their bytes."""

    def __init__(self) -> None:
        self.keys: MutableMapping[tuple[float, int], str] = SortedDict()
        self.nbytes = 0


class EvictionIndex:
    """Keeps keys and their sizes in bytes in the order of their eviction: those of the lowest
    priority go first, of equal ones the least recently used. Not thread safe: the tier's lock
    guards it.

    Under ``lru`` all priorities are equal. Under ``reuse`` they are Cache-Craft's reuse frequency
    f_r, with LFU's dynamic ageing (Arlitt et al., "Evaluating content management techniques for Web
    proxy caches", 2000): a key's priority is f_r plus the age at its last use, and the age is the
    priority of the last evicted key. Without ageing, newcomers would evict each other while unused
    keys stayed. f_r is not divided by the size: both the savings of a use and the size grow with
    the chunk's tokens.

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
        self._by_reuse = eviction == "reuse"
        self._age = 0.0
        self._next_uses = next_uses
        self._uses = 0
        self._pinned_keys = frozenset(pinned)
        self._held_keys: set[str] = set()
        self._entries: dict[str, _Entry] = {}
        self._evictable, self._pinned, self._held = _Group(), _Group(), _Group()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """The bytes of all keys."""
        return self._evictable.nbytes + self._pinned.nbytes + self._held.nbytes

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Call ``make_room(0)`` then: what is there may take more than it."""
        self.budget_bytes = budget_bytes
        self._most_pinned_bytes = int(budget_bytes * PINNED_SHARE)

    def keys(self) -> tuple[str, ...]:
        """Return all keys, the next to be evicted first, but pinned ones last, and held ones after
        these."""
        groups = self._evictable, self._pinned, self._held
        return tuple(chain.from_iterable(group.keys.values() for group in groups))

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
        assert not self._held_keys
        once = use_weight(1.0)
        priority = self._priority(once)
        self._entries = {
            key: _Entry(nbytes, once, (priority, use)) for use, (key, nbytes) in enumerate(sizes, 1)
        }
        self._uses = len(self._entries)
        pinned = {self._entries[key].rank: key for key in self._pinned_keys & self._entries.keys()}
        self._pinned.keys.update(pinned)
        self._pinned.nbytes = sum(self._entries[key].nbytes for key in pinned.values())
        self._evictable.keys.update(
            (entry.rank, key) for key, entry in self._entries.items() if entry.rank not in pinned
        )
        self._evictable.nbytes = (
            sum(entry.nbytes for entry in self._entries.values()) - self._pinned.nbytes
        )

    def remove(self, key: str) -> bool:
        """Forget the key; returns False if it was absent."""
        if key not in self._entries:
            return False
        self._taken(key)
        return True

    def fits(self, nbytes: int) -> bool:
        """Return whether ``make_room`` can make room for ``nbytes`` bytes."""
        kept = self._held.nbytes + min(self._pinned.nbytes, self._most_pinned_bytes)
        return nbytes <= self.budget_bytes - kept

    def make_room(self, nbytes: int) -> list[tuple[str, int]]:
        """Remove keys until ``nbytes`` more fit; returns them with their sizes.

        In the order of eviction, but of each owner's keys those that are needed last. Pinned ones
        go before others as far as they exceed their share of the budget, and after them if held
        ones need the room. Held ones stay, even if too little fits then.
        """
        removed: list[tuple[str, int]] = []
        while self.used_bytes + nbytes > self.budget_bytes:
            if self._evictable.keys and self._pinned.nbytes <= self._most_pinned_bytes:
                (priority, _), key = next(iter(self._evictable.keys.items()))
                self._age = max(self._age, priority)
                if self._next_uses is not None:
                    key = self._next_uses.needed_last(self._next())
            elif self._pinned.keys:
                key = next(iter(self._pinned.keys.values()))
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
        return islice(self._evictable.keys.values(), MOST_COMPARED)

    def _set_held(self, key: str, *, held: bool) -> None:
        entry = self._taken(key) if key in self._entries else None
        if held:
            self._held_keys.add(key)
        else:
            self._held_keys.discard(key)
        if entry is not None:
            self._enter(key, entry)

    def _priority(self, reuse: float) -> float:
        """Return the priority of a key that is used now, and whose uses add up to ``reuse``."""
        return self._age + reuse if self._by_reuse else 0.0

    def _used(self, nbytes: int, reuse: float) -> _Entry:
        """Return the entry of a key that is used now."""
        self._uses += 1
        return _Entry(nbytes, reuse, (self._priority(reuse), self._uses))

    def _group(self, key: str) -> _Group:
        if key in self._held_keys:
            return self._held
        return self._pinned if key in self._pinned_keys else self._evictable

    def _enter(self, key: str, entry: _Entry) -> None:
        self._entries[key] = entry
        group = self._group(key)
        group.keys[entry.rank] = key
        group.nbytes += entry.nbytes

    def _taken(self, key: str) -> _Entry:
        """Remove a present key; returns its entry."""
        entry = self._entries.pop(key)
        group = self._group(key)
        del group.keys[entry.rank]
        group.nbytes -= entry.nbytes
        return entry
