"""Keeps chunks in this process's memory: the fastest tier, which every store has."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvlinker.base.events import ChunkEvicted, Events
from kvlinker.base.types.chunks import Eviction
from kvlinker.store.chunk_kv import ChunkKV, ChunkReader, LayerKV
from kvlinker.store.eviction import EvictionIndex, NextUses
from kvlinker.store.throttle import Rest, no_rest
from kvlinker.store.tiers.base import LocalTier, Tier, TierCheck
from kvlinker.store.tiers.configured import ConfiguredTier, register


class HostTier(LocalTier):
    """A tier that keeps the tensors that were put, without a copy; a chunk's size here is its
    ``ChunkKV.nbytes``.

    Chunks that are held stay, whatever the budget: their holders make sure that they fit.
    """

    def __init__(
        self,
        budget_bytes: int,
        events: Events,
        *,
        name: str = "host",
        pinned: Set[str] = frozenset(),
        eviction: Eviction = "lru",
        next_uses: NextUses | None = None,
    ) -> None:
        super().__init__(name, EvictionIndex(budget_bytes, pinned, eviction, next_uses))
        self.speed_name = name
        self._events = events
        self._kv: dict[str, ChunkKV] = {}

    def get(self, key: str) -> ChunkKV | None:
        with self._lock:
            self._index.touch(key)
            return self._kv.get(key)

    def open(self, key: str) -> ChunkReader | None:
        kv = self.get(key)
        return None if kv is None else ResidentReader(kv)

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        nbytes = kv.nbytes
        with self._lock:
            if self._index.touch(key):
                return True
            if not self._accepts(key, nbytes):
                return False
            self._make_room(nbytes)
            self._index.add(key, nbytes)
            self._kv[key] = kv
            return True

    def hold(self, keys: Iterable[str]) -> None:
        """Keep the keys, present or not, from eviction until they are released; ``put`` never
        refuses them."""
        with self._lock:
            self._index.hold(keys)

    def release(self, keys: Iterable[str]) -> None:
        """Allow the keys' eviction again."""
        with self._lock:
            self._index.release(keys)
            self._make_room(0)

    def make_room_for(self, key: str, nbytes: int) -> bool:
        """Make room for a chunk that is expected, where others of its owner are needed later and
        their room suffices; returns whether there is room."""
        with self._lock:
            removed = self._index.make_room_for(key, nbytes)
            self._discard(removed or ())
            return removed is not None

    def contains(self, key: str) -> bool:
        return key in self._kv

    def delete(self, key: str) -> bool:
        with self._lock:
            if self._index.remove(key):
                del self._kv[key]
        return True

    def check(self) -> TierCheck:
        return TierCheck(self.name, checked=len(self), damaged=())

    def close(self) -> None:
        with self._lock:
            for key in tuple(self._kv):
                self._index.remove(key)
            self._kv.clear()

    def _accepts(self, key: str, nbytes: int) -> bool:
        """Return whether to keep an absent key; the lock is held."""
        return self._index.is_held(key) or self._index.fits(nbytes)

    def _make_room(self, nbytes: int) -> None:
        self._discard(self._index.make_room(nbytes))

    def _discard(self, removed: Iterable[tuple[str, int]]) -> None:
        for evicted, size in removed:
            del self._kv[evicted]
            self._events.publish(ChunkEvicted(self.name, size))


@register
class ConfiguredHost(ConfiguredTier):
    """Keeps chunks in host memory, which comes first of what the store has; without a budget, it
    stays empty."""

    name = "host"
    rank = 10
    settings = ("host_memory", "eviction")
    is_left_out = False

    @property
    def budget_bytes(self) -> int:
        return self.setup.host_bytes

    def open(self) -> Tier:
        eviction = self.setup.settings.eviction
        return HostTier(
            self.budget_bytes,
            self.setup.events,
            pinned=self.setup.pinned,
            eviction=eviction,
            next_uses=self.setup.next_uses,
        )


class ResidentReader:
    """The ``ChunkReader`` of KV that is in memory."""

    def __init__(self, kv: ChunkKV) -> None:
        self._kv = kv
        self.layers = len(kv.layers)
        self.tokens = kv.tokens
        self.nbytes = kv.nbytes
        self.contexts = kv.contexts
        self.scores = kv.scores
        self.states = kv.states

    def read(self, layer: int) -> LayerKV:
        return self._kv.layers[layer]

    def close(self) -> None:
        """Do nothing: no copy is open."""
