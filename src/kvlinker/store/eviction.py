"""Selects the chunks that a tier evicts: ``EvictionIndex`` keeps a tier's keys in the order of
eviction, and ``NextUses`` the predicted uses, by which a chunk that is needed soon is spared."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from sortedcontainers import SortedDict

from kvlinker.base.events import ChunkNamed, Event, Events, EvictionSwap
from kvlinker.base.types.chunks import Eviction

PINNED_SHARE = 0.8
"""The share of a tier's budget that pinned chunks may keep; chosen by hand. Beyond it they are
evicted like others, so that a small tier remains useful."""

LEAST_SHARE = 1 / 16
"""The least share of a chunk that a use counts as computing again; smaller shares count as this
one; chosen by hand."""

MOST_REUSE = 256.0
"""The most that uses can add up to, so that a chunk that was once used very often can still be
evicted later; chosen by hand."""


MOST_OWNED = 65_536
"""The most chunks whose owners are remembered; those that were named last stay; chosen by hand."""

MOST_PLANS = 64
"""The most plans of one owner that count; the newest stay; chosen by hand."""

MOST_OWNERS = 256
"""The most owners whose plans count; the most recent ones stay; chosen by hand."""

LEAST_GRACE = 30.0
"""The seconds that a chunk is at least still expected after it was due; otherwise as long as it was
ahead; chosen by hand."""

MOST_COMPARED = 1024
"""The most chunks, the next to be evicted first, that are compared by their next uses; chosen by
hand."""

T = TypeVar("T", bound=Hashable)


def use_weight(recomputed: float) -> float:
    """Return the addend of a use to a chunk's reuse frequency f_r: 1 / ``recomputed``, from 1 to 1
    / LEAST_SHARE.

    ``recomputed`` is the share of the chunk's tokens that the use computes again; under Cache-Craft
    the CFO (section 3.3).
    """
    return 1 / min(1.0, max(recomputed, LEAST_SHARE))


class _Group:
    """Keys that are evicted alike, by rank, and the sum of their bytes."""

    def __init__(self) -> None:
        self.keys: MutableMapping[tuple[float, int], str] = SortedDict()
        self.nbytes = 0


@dataclass(slots=True)
class _Entry:
    """A key's size, uses and group."""

    nbytes: int
    reuse: float
    """The sum of the weights of its uses."""
    rank: tuple[float, int]
    """The priority and the time of the last use; the lowest is evicted first."""
    group: _Group


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
        changed = keys ^ self._pinned_keys
        self._pinned_keys = frozenset(keys)
        for key in changed & self._entries.keys():
            self._move(key, self._group(key))

    def is_held(self, key: str) -> bool:
        """Return whether the key is held, present or not."""
        return key in self._held_keys

    def hold(self, keys: Iterable[str]) -> None:
        """Keep the keys, present or not, from eviction until they are released."""
        for key in keys:
            self._held_keys.add(key)
            if key in self._entries:
                self._move(key, self._held)

    def release(self, keys: Iterable[str]) -> None:
        """Allow the keys' eviction again. Call ``make_room(0)`` then: held keys may have taken more
        than the budget."""
        for key in keys:
            self._held_keys.discard(key)
            if key in self._entries:
                self._move(key, self._group(key))

    def touch(self, key: str, weight: float = 0.0) -> bool:
        """Note a use, now the last one, that adds ``weight`` to the sum of the key's uses; returns
        False if it is absent."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        del entry.group.keys[entry.rank]
        entry.reuse = min(entry.reuse + weight, MOST_REUSE)
        self._uses += 1
        entry.rank = (self._age + entry.reuse if self._by_reuse else 0.0, self._uses)
        entry.group.keys[entry.rank] = key
        return True

    def add(self, key: str, nbytes: int) -> None:
        """Add an absent key, now used last. Does not look at the budget: call ``make_room``
        first."""
        self._uses += 1
        reuse = use_weight(1.0)
        rank = self._age + reuse if self._by_reuse else 0.0, self._uses
        group = self._group(key)
        self._entries[key] = _Entry(nbytes, reuse, rank, group)
        group.keys[rank] = key
        group.nbytes += nbytes

    def fill(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Add all of these, in this order, to an index that is empty; quicker than one by one."""
        assert not self._entries
        assert not self._held_keys
        reuse = use_weight(1.0)
        priority = self._age + reuse if self._by_reuse else 0.0
        ranked: dict[_Group, list[tuple[tuple[float, int], str]]] = {
            self._evictable: [],
            self._pinned: [],
        }
        for key, nbytes in sizes:
            self._uses += 1
            group = self._group(key)
            entry = _Entry(nbytes, reuse, (priority, self._uses), group)
            self._entries[key] = entry
            ranked[group].append((entry.rank, key))
            group.nbytes += nbytes
        for group, keys in ranked.items():
            group.keys.update(keys)

    def remove(self, key: str) -> bool:
        """Forget the key; returns False if it was absent."""
        if key not in self._entries:
            return False
        self._take_out(key)
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
            removed.append((key, self._take_out(key)))
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
        return None if lacking > 0 else [(other, self._take_out(other)) for other in removed]

    def _next(self) -> Iterable[str]:
        """Return the keys that are evicted next."""
        return islice(self._evictable.keys.values(), MOST_COMPARED)

    def _group(self, key: str) -> _Group:
        if key in self._held_keys:
            return self._held
        return self._pinned if key in self._pinned_keys else self._evictable

    def _move(self, key: str, group: _Group) -> None:
        """Move a present key to the group."""
        entry = self._entries[key]
        del entry.group.keys[entry.rank]
        entry.group.nbytes -= entry.nbytes
        group.keys[entry.rank] = key
        group.nbytes += entry.nbytes
        entry.group = group

    def _take_out(self, key: str) -> int:
        """Remove a present key; returns its bytes."""
        entry = self._entries.pop(key)
        del entry.group.keys[entry.rank]
        entry.group.nbytes -= entry.nbytes
        return entry.nbytes


class _Due(NamedTuple):
    """When a chunk is expected to be used, and until when that is believed, by the clock."""

    at: float
    until: float


class _Uses:
    """The predicted uses of one chunk, by plan. The earliest use is cached until a use is over,
    because evictions look at many chunks at a time."""

    __slots__ = ("_first", "plans")

    def __init__(self) -> None:
        self.plans: dict[str, _Due] = {}
        self._first: _Due | None = None

    def expect(self, plan: str, due: _Due) -> None:
        """Expect a use under this plan."""
        self.plans[plan] = due
        self._first = None

    def forget(self, plan: str) -> None:
        """Expect no use under this plan."""
        self.plans.pop(plan, None)
        self._first = None

    def due(self, now: float) -> float:
        """Return when the next use is expected; infinity if none is."""
        if self._first is None or self._first.until <= now:
            live = (due for due in self.plans.values() if due.until > now)
            self._first = min(live, default=_Due(math.inf, math.inf))
        return self._first.at


class NextUses:
    """Knows which chunks are expected to be used, and when. Expectations never cost another owner
    anything: where a chunk would be evicted that its owner needs soon, another one of the same
    owner goes instead. Methods may be called from any thread."""

    def __init__(self, events: Events, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._clock = clock
        self._lock = threading.Lock()
        self._owners: OrderedDict[str, str] = OrderedDict()  # by chunk key
        # The keys that an owner's plans expect.
        self._plans: OrderedDict[str, OrderedDict[str, set[str]]] = OrderedDict()
        self._uses: dict[str, _Uses] = {}  # by chunk key

    def listen(self, event: Event) -> None:
        """Take note of chunks' owners; ``Events.subscribe`` takes this."""
        if isinstance(event, ChunkNamed):
            with self._lock:
                before = self._owners.pop(event.chunk_key, event.owner)
                if before != event.owner:
                    self._disown(event.chunk_key, before)
                self._owners[event.chunk_key] = event.owner
                if len(self._owners) > MOST_OWNED:
                    self._disown(*self._owners.popitem(last=False))

    def expect(self, owner: str, plan: str, seconds: Mapping[str, float]) -> None:
        """Predict the next use of the owner's chunks in ``seconds``, by key, in place of all that
        this plan expected. Chunks of other owners, shared ones too, do not count."""
        now = self._clock()
        with self._lock:
            plans = self._plans.setdefault(owner, OrderedDict())
            self._plans.move_to_end(owner)
            if len(self._plans) > MOST_OWNERS:
                for other, keys in self._plans.popitem(last=False)[1].items():
                    self._forget(other, keys)
            self._forget(plan, plans.pop(plan, ()))
            plans[plan] = {key for key in seconds if self._owners.get(key) == owner}
            for key in plans[plan]:
                at = now + seconds[key]
                due = _Due(at, at + max(seconds[key], LEAST_GRACE))
                self._uses.setdefault(key, _Uses()).expect(plan, due)
            if len(plans) > MOST_PLANS:
                self._forget(*plans.popitem(last=False))

    def used(self, owner: str, plan: str, keys: Set[str]) -> None:
        """Expect these chunks no more under this plan: it uses them now."""
        with self._lock:
            plans = self._plans.get(owner)
            expected = plans.get(plan, set()) if plans else set[str]()
            self._forget(plan, keys & expected)
            expected -= keys

    def due(self, key: str) -> float:
        """Return when the chunk is expected to be used next, by the clock; infinity if no use is
        expected."""
        with self._lock:
            return self._due(key, self._clock())

    def needed_last(self, keys: Iterable[str]) -> str:
        """Return which of these ``keys``, the next to be evicted first, goes: the first, or, if
        that is expected, the one of its owner that is needed last."""
        line = iter(keys)
        first = next(line)
        with self._lock:
            now = self._clock()
            owner = self._owners.get(first, "")
            if self._due(first, now) == math.inf:
                return first
            own = (key for key in line if self._owners.get(key) == owner)
            found = needed_last([first, *own], lambda key: self._due(key, now))
        if found != first:
            self._events.publish(EvictionSwap())
        return found

    def needed_later(self, key: str, keys: Iterable[str]) -> list[str]:
        """Return which of these ``keys`` are the owner's of ``key`` and needed later than it, those
        that are needed last first."""
        with self._lock:
            now = self._clock()
            owner, due = self._owners.get(key), self._due(key, now)
            dues = {each: self._due(each, now) for each in keys if self._owners.get(each) == owner}
        later = [each for each, at in dues.items() if at > due]
        return sorted(later, key=lambda each: -dues[each])

    def _due(self, key: str, now: float) -> float:
        uses = self._uses.get(key)
        return math.inf if uses is None else uses.due(now)

    def _disown(self, key: str, owner: str) -> None:
        """Expect no uses of a chunk by who was its owner; the lock is held."""
        if self._uses.pop(key, None) is not None:
            for keys in self._plans[owner].values():
                keys.discard(key)

    def _forget(self, plan: str, keys: Iterable[str]) -> None:
        """Expect no uses of these chunks under this plan; the lock is held."""
        for key in keys:
            uses = self._uses[key]
            uses.forget(plan)
            if not uses.plans:
                del self._uses[key]


def needed_last(candidates: Iterable[T], due: Callable[[T], float]) -> T:
    """Return the first candidate without an expected use (whose ``due`` is infinity), or else the
    one that is due last."""
    best: T | None = None
    latest = -math.inf
    for candidate in candidates:
        at = due(candidate)
        if at > latest:
            best, latest = candidate, at
        if latest == math.inf:
            break
    assert best is not None, "there are no candidates"
    return best
