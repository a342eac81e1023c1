"""The contents of a chunk store's tiers, the chunks that they should keep, and their fill
levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from hashlib import sha256
from socket import gethostname

from kvlinker.base.types.residency import MEMORY
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.eviction import use_weight
from kvlinker.store.holds import Hold, Holds
from kvlinker.store.tiers.base import Tier, TierCheck, TierUsage, lacks_scores
from kvlinker.store.tiers.device import DeviceTier
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.tiers.host import HostTier
from kvlinker.store.writer import BackgroundWriter

LONGEST_CREATION_SECONDS = 3600.0
"""The seconds during which a chunk's KV may be stored, or found, before its creation is over, and
the catalog has its context cache."""


class Inventory:
    """Lists what is in the tiers, from the fastest to the slowest, and in the queues of those that
    are written in the background; and passes on to the tiers which chunks matter, and which are in
    use."""

    def __init__(
        self,
        host: HostTier,
        slower: Sequence[Tier],
        writers: Mapping[str, BackgroundWriter],
        device: DeviceTier | None,
    ) -> None:
        """``writers`` has one for each of the ``slower`` tiers, by name; ``device`` stands before
        the host's."""
        self._host = host
        self._slower = tuple(slower)
        self._tiers = (host, *self._slower)
        self._device = device
        self._in_memory: tuple[HostTier, ...] = (host,) if device is None else (device, host)
        self._all_tiers: tuple[Tier, ...] = (*self._in_memory, *self._slower)
        self._writers = dict(writers)
        self._holds = Holds(self._in_memory)

    def is_resident(self, key: str) -> bool:
        """Return whether ``get_resident`` would find the chunk. Does not count as a use."""
        return any(tier.contains(key) for tier in self._in_memory) or (
            self._waiting(key) is not None
        )

    def tier_of(self, key: str) -> str | None:
        """Return the name of the fastest tier that has the chunk. Does not count as a use."""
        if self._device is not None and self._device.contains(key):
            return self._device.name
        if self.is_resident(key):
            return self._host.name
        return next((tier.name for tier in self._slower if tier.contains(key)), None)

    def nbytes(self, key: str) -> int | None:
        """Return the bytes of the chunk in the fastest tier that has it, or None. Does not count as
        a use."""
        waiting = self._waiting(key)
        if waiting is not None:
            return waiting.nbytes
        return next(
            (size for tier in self._all_tiers if (size := tier.nbytes(key)) is not None), None
        )

    def note_use(self, key: str, recomputed: float) -> None:
        """Note that a request has used the chunk, computing this share of its tokens again: the
        smaller the share, the more the use counts in tiers that evict by reuse. Call it once per
        request and place in its prompt."""
        for tier in self._all_tiers:
            tier.note_use(key, use_weight(recomputed))

    def hold(self, sizes: Mapping[str, int]) -> Hold | None:
        """Keep these chunks, whose bytes are ``sizes``, in memory from their arrival until the
        result is released; None if the held chunks would exceed memory's budget.

        If no others are held, those that exceed the budget alone are held too, so that any prompt
        can be computed.
        """
        return self._holds.take(sizes)

    @property
    def held_bytes(self) -> int:
        """The bytes of all chunks that are held."""
        return self._holds.nbytes

    def make_room_for(self, key: str, nbytes: int) -> bool:
        """Make room in memory for a chunk that is expected, where others of its owner are needed
        later and their room suffices; returns whether there is room, in addition to held chunks
        that have not arrived."""
        awaited = self._holds.awaited_bytes(self._host.contains)
        return self._host.make_room_for(key, nbytes + awaited)

    def set_pinned(self, keys: Set[str]) -> None:
        """Pin these keys in the tiers, and unpin all others; see ``Tier.set_pinned``."""
        for tier in self._all_tiers:
            tier.set_pinned(keys)

    def keys(self) -> frozenset[str]:
        """Return the keys of all chunks that the store has."""
        return self._keys(self._all_tiers)

    def own_places(self, *, limit: int) -> dict[str, str]:
        """Return the fastest tier of this store alone that has a chunk, by chunk key: ``MEMORY``
        for everything in memory or waiting to be written; of each slower tier, the ``limit`` chunks
        that it evicts last."""
        places: dict[str, str] = {}
        for tier in reversed(self._slower):
            if not tier.shared:
                places |= dict.fromkeys(tier.keys()[-limit:], tier.name)
        return places | dict.fromkeys(self._keys(self._in_memory), MEMORY)

    def slower_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers that chunks are loaded from, from the fastest to the slowest."""
        return self._slower

    def left_keys(self) -> frozenset[str]:
        """Return the keys of all chunks on disks of this store alone that no process has written or
        used for ``LONGEST_CREATION_SECONDS``: those that no context cache holds are left over."""
        disks = (tier for tier in self._tiers if isinstance(tier, DiskTier))
        return frozenset().union(*(disk.unused_for(LONGEST_CREATION_SECONDS) for disk in disks))

    def stored_here(self, keys: Set[str]) -> frozenset[str]:
        """Return those of the keys that tiers of this store alone, its device's included, know of,
        or that wait to be written."""
        known = [(tier.sizes(keys) or {}).keys() for tier in self._all_tiers if not tier.shared]
        waiting = [keys & set(writer.keys()) for writer in self._writers.values()]
        return frozenset().union(*known, *waiting)

    def lacks_scores(self, key: str) -> bool:
        """Return whether the fastest copy of the chunk on the host or below has no scores, or no
        sensitivity among them; False if there is no copy. Counts as a use, and reads a header where
        the chunk is not in memory."""
        waiting = self._waiting(key)
        if waiting is not None:
            return waiting.scores is None or waiting.scores.sensitivity is None
        tier = next((tier for tier in self._tiers if tier.contains(key)), None)
        return tier is not None and lacks_scores(tier, key)

    @property
    def largest_budget_bytes(self) -> int:
        """The budget of the tier of this store alone that has the largest."""
        return max((tier.budget_bytes for tier in self._tiers if not tier.shared), default=0)

    def usage_of(self, keys: Set[str]) -> tuple[TierUsage, ...]:
        """Return the size of these chunks in each tier, from the fastest to the slowest; takes time
        for many."""
        usages = []
        for tier in self._all_tiers:
            sizes = tier.sizes(keys)
            known = sizes or {}
            usages.append(
                TierUsage(
                    tier.name,
                    sum(known.values()),
                    tier.budget_bytes,
                    len(known),
                    reachable=sizes is not None,
                )
            )
        return tuple(usages)

    @property
    def largest_budget(self) -> int:
        """The bytes that the tier with most room may keep."""
        return max(tier.budget_bytes for tier in self._all_tiers)

    def usage(self) -> tuple[TierUsage, ...]:
        """Return how full each tier is, from the fastest to the slowest."""
        return tuple(
            TierUsage(tier.name, tier.used_bytes, tier.budget_bytes, len(tier))
            for tier in self._all_tiers
        )

    def places(self) -> dict[str, str]:
        """Return a name, which reveals nothing, for the place of each tier outside memory: stores
        whose places have the same name share the tier."""
        return {
            tier.name: sha256(
                f"{'' if tier.shared else gethostname()} {tier.speed_name}".encode()
            ).hexdigest()[:16]
            for tier in self._slower
        }

    def check(self) -> tuple[TierCheck, ...]:
        """Read and verify every stored copy, drop the damaged ones, and return one result per
        tier."""
        return tuple(tier.check() for tier in self._all_tiers)

    def _waiting(self, key: str) -> ChunkKV | None:
        return next(
            (kv for writer in self._writers.values() if (kv := writer.get(key)) is not None), None
        )

    def _keys(self, tiers: Sequence[Tier]) -> frozenset[str]:
        waiting = [writer.keys() for writer in self._writers.values()]
        return frozenset().union(*waiting, *(tier.keys() for tier in tiers))
