"""What the store knows of a tier: one place that keeps chunk caches within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Protocol

from kvlinker.events import ChunkDamaged
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.layer_stream import ChunkReader
from kvlinker.store.throttle import Rest, no_rest


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is. ``reachable``: False where it does not answer, and nothing was counted."""

    name: str
    used_bytes: int
    budget_bytes: int
    chunks: int
    reachable: bool = True


@dataclass(frozen=True, slots=True)
class TierCheck:
    """What ``Tier.check`` found: how many copies it read, and those that were damaged and are now gone."""

    name: str
    checked: int
    damaged: tuple[ChunkDamaged, ...]


class Tier(Protocol):
    """Keeps chunk caches under their chunk keys (``chunk_key`` in hexadecimal), and evicts the least used first:
    least recently, or, for the tiers of one server alone, by what uses add up to (``store/eviction.py``).

    A key names its content: all KV ever put under one key is interchangeable. A tier is a cache, so any chunk may
    be gone at any time, and no method raises because a medium fails: a failed write was not stored, a damaged or
    unreadable copy is a miss. The tier publishes ``ChunkEvicted`` and ``ChunkDamaged`` itself.

    All methods may be called from any thread. None of them waits for another thread's bulk reads or writes.
    """

    @property
    def name(self) -> str:
        """What events and usage call it, such as "host" or "disk"."""
        ...

    @property
    def speed_name(self) -> str:
        """What its bandwidth is remembered under: all that it depends on (see ``bandwidth.speed_name``)."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other servers keep chunks here, which this one's catalog does not know."""
        ...

    @property
    def budget_bytes(self) -> int:
        """``used_bytes`` never exceeds this."""
        ...

    @property
    def used_bytes(self) -> int:
        """The sum of ``nbytes(key)`` over ``keys()``."""
        ...

    def get(self, key: str) -> ChunkKV | None:
        """The chunk's KV, now the most recently used, or None. The caller must not modify it."""
        ...

    def open(self, key: str) -> ChunkReader | None:
        """The chunk's KV to be read layer by layer, now the most recently used, or None. To be closed by the caller.

        A copy that turns out damaged while it is read is dropped as ``get`` would drop it.
        """
        ...

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        """Keep the KV, evicting the least used chunks for it; returns whether the tier now holds the key.

        False: larger than what pinned chunks leave of the budget (then nothing is evicted), or the medium failed. A
        key that is held already only becomes the most recently used. ``rest`` is called between pieces of work.
        """
        ...

    def note_use(self, key: str, weight: float) -> None:
        """A request has used the chunk, wherever its KV came from; ``weight`` as of ``eviction.use_weight``.

        Absent keys do not count, and shared tiers need not.
        """
        ...

    def set_pinned(self, keys: Set[str]) -> None:
        """From now on, evict none of these keys unless they take more than ``eviction.PINNED_SHARE`` of the budget, and
        keys that were pinned before as any others. Absent keys count once they are put. ``delete`` heeds no pin, and
        shared tiers need not.
        """
        ...

    def contains(self, key: str) -> bool:
        """Whether ``get`` would look at a copy. Does not count as a use."""
        ...

    def delete(self, key: str) -> bool:
        """Forget the key; an absent key is no error. False: the medium has not let go of its bytes yet, though they are
        not found any more; the tier tries that again, and so may the caller.
        """
        ...

    def keys(self) -> tuple[str, ...]:
        """The keys held, in the order of eviction, but pinned ones last."""
        ...

    def __len__(self) -> int:
        """The number of chunks held."""
        ...

    def nbytes(self, key: str) -> int | None:
        """Bytes that the chunk takes up in this tier, or None where it is absent. Does not count as a use."""
        ...

    def sizes(self, keys: Iterable[str]) -> dict[str, int] | None:
        """``nbytes`` of those of the keys that the tier knows of, with few questions to its medium, so that what other
        processes put here lately may be missing; None where the medium does not answer."""
        ...

    def check(self) -> TierCheck:
        """Read every copy as ``get`` would, without counting as a use; damaged ones are removed and reported."""
        ...

    def close(self) -> None:
        """Give up memory and handles; what a persistent tier keeps stays. Idempotent."""
        ...
