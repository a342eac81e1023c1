"""Keeps the expected next uses of chunks, by which a tier evicts, among an owner's own chunks,
those that are needed last."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from typing import NamedTuple, TypeVar

from kvlinker.base.events import ChunkNamed, ChunkSpared, Event, Events

MOST_OWNED = 65_536
"""The most chunks whose owners are remembered; those that were named last stay."""

MOST_PLANS = 64
"""The most plans of one owner that count; the newest stay."""

MOST_OWNERS = 256
"""The most owners whose plans count; the most recent ones stay."""

LEAST_GRACE = 30.0
"""The seconds that a chunk is at least still expected after it was due; otherwise as long as it was
ahead."""

MOST_COMPARED = 1024
"""The most chunks, the next to be evicted first, that are compared by their next uses."""

T = TypeVar("T", bound=Hashable)


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
            self._events.publish(ChunkSpared())
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
