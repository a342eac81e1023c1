"""Presents all tiers as one chunk store: engines put and get KV here, the server deletes and
reports."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from socket import gethostname

from kvlinker.base.events import ChunkLoaded, ChunkLookup, Events
from kvlinker.base.futures import completed
from kvlinker.base.types.residency import MEMORY
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.eviction import NextUses, use_weight
from kvlinker.store.loading.arriving import KV
from kvlinker.store.loading.bandwidths import Bandwidths, LoadTime
from kvlinker.store.loading.loader import LayerLoader
from kvlinker.store.loading.prompt_load import ChunkLoad, LoadedChunk, OpenedChunk, Urgency
from kvlinker.store.memory.resident import Residence
from kvlinker.store.prefixes import SpilledPrefixes, remove_leftovers
from kvlinker.store.speeds import Speeds
from kvlinker.store.throttle import Throttle
from kvlinker.store.tiers.base import Tier, TierCheck, TierUsage, lacks_scores
from kvlinker.store.tiers.device import DeviceTier
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.tiers.host import HostTier
from kvlinker.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)

LONGEST_CREATION_SECONDS = 3600.0
"""The seconds during which a chunk's KV may be stored, or found, before its creation is over, and
the catalog has its context cache; chosen by hand."""


DEFAULT_WRITE_QUEUE_BYTES = 1 << 30
"""The bytes that may wait to be written to one slower tier; chosen by hand."""

SHARED_TIERS_CLOSE_SECONDS = 10.0
"""The seconds that closing waits for writes to shared tiers; chosen by hand."""


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
            used = sum(self._nbytes.values())
            if sizes and used:
                new = sum(nbytes for key, nbytes in sizes.items() if key not in self._uses)
                if used + new > min(tier.budget_bytes for tier in self._tiers):
                    return None
            return Hold(self, sizes)

    def begin(self, keys: Collection[str], sizes: Mapping[str, int]) -> None:
        """Count one more request for each of the keys; the lock is held."""
        new = []
        for key in keys:
            self._uses[key] += 1
            if self._uses[key] == 1:
                self._nbytes[key] = sizes[key]
                new.append(key)
        if new:
            for tier in self._tiers:
                tier.hold(new)

    def end(self, keys: Collection[str]) -> None:
        """Count one request less for each of the keys; the lock is held."""
        self._uses.subtract(list(keys))
        unused = [key for key in keys if not self._uses[key]]
        for key in unused:
            del self._uses[key], self._nbytes[key]
        for tier in self._tiers:
            tier.release(unused)


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
            new = sizes.keys() - self.keys
            if self.users and new:
                self._holds.begin(new, sizes)
                self.keys |= new

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


class ChunkStore:
    """Keeps KV in tiers from the fastest to the slowest. It is written through to all, and again
    when it is promoted on use: a slower tier that has it takes that as a use, one that lost it has
    it back.

    ``put`` stores into the first tier at once and leaves each slower one to a background thread of
    its own, so that none holds up another. A chunk that waits for such a thread counts as one of
    the first tier, and is found there even if that tier has no room for it. When more than
    ``write_queue_bytes`` wait for a tier, it does not get the chunk at all: the caller never waits,
    and a chunk that is then evicted from the others is computed again. Besides the tiers' budgets,
    at most ``write_queue_bytes`` plus two chunks of memory are held for each slower tier. Code that
    computes on the same processors enters ``throttle``, so that writes hardly slow it.

    Before them may stand a ``device`` tier. Chunks that are found in the first tier are copied up
    to it, and read from there as long as they stay; nothing is ever written down from it.

    All methods may be called from any thread. Listeners of the tiers' events must not call
    ``delete`` or ``flush``.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        events: Events,
        *,
        device: DeviceTier | None = None,
        next_uses: NextUses | None = None,
        write_queue_bytes: int = DEFAULT_WRITE_QUEUE_BYTES,
        speeds: Speeds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tiers`` begin with one in memory, or ValueError is raised. ``next_uses`` orders
        evictions, ``speeds`` keeps measurements, and ``clock`` measures delays."""
        if not tiers or not isinstance(tiers[0], HostTier):
            raise ValueError(
                "A chunk store needs at least one tier, the first of which keeps chunks in memory."
            )
        self.throttle = Throttle()
        writers = {
            tier.name: BackgroundWriter(tier, write_queue_bytes, self.throttle)
            for tier in tiers[1:]
        }
        self._host = tiers[0]
        self._slower = tuple(tiers[1:])
        self._tiers = (self._host, *self._slower)
        self._device = device
        self._in_memory: tuple[HostTier, ...] = (
            (self._host,) if device is None else (device, self._host)
        )
        self._all_tiers: tuple[Tier, ...] = (*self._in_memory, *self._slower)
        self._writers = writers
        self._holds = Holds(self._in_memory)
        self._events = events
        self.next_uses = next_uses or NextUses(events)
        # makes queueing and the first tier's put one step; guards the two counts
        self._lock = threading.RLock()
        self._deletes_running = 0
        self._deletes_done = 0
        self._residence = Residence()
        bandwidths = Bandwidths(speeds, {tier.name: tier.speed_name for tier in self._tiers})
        self._loader = LayerLoader(
            bandwidths, lambda layers: self._residence.of_layers(layers), clock=clock
        )
        self._ahead: list[Future[KV | None]] = []
        self._speeds = speeds
        self._disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        self._prefixes: SpilledPrefixes | None = None
        if self._disk is not None:
            remove_leftovers(self._disk.directory)
        atexit.register(self.close)

    def keep_resident_as(self, residence: Residence) -> None:
        """Keep chunks in the device's and the first tier in this form, which ``get``,
        ``get_resident`` and ``load`` give; ``put`` takes, and the other tiers keep, the KV as it
        was computed. To be called before there are any."""
        self._residence = residence

    def get(self, key: str) -> ChunkKV | None:
        """Return the chunk's KV from the fastest tier that has it, on the host or on the device, or
        None if no tier has it. It is now in the first tier, too, and soon in the others.

        The caller must not modify it. Publishes one ChunkLookup, and on a hit one ChunkLoaded.
        """
        epoch = self._delete_epoch()
        started = time.perf_counter()
        kv = self.get_resident(key)
        if kv is not None:
            return kv
        for tier in self._slower:
            kv = tier.get(key)
            if kv is not None:
                loaded = LoadedChunk(
                    tier.name,
                    self._residence.resident(kv),
                    time.perf_counter() - started,
                    stored=kv,
                )
                self._loaded(key, epoch, loaded)
                return loaded.kv
        self._loaded(key, epoch, None)
        return None

    def get_computed(self, key: str) -> ChunkKV | None:
        """Return the chunk's KV in the form in which it was computed, with rounding errors; None if
        no tier has it."""
        kv = self.get(key)
        return None if kv is None else self._residence.computed(kv)

    def get_resident(self, key: str) -> ChunkKV | None:
        """Return the chunk's KV as ``get`` does, but only from the device, the first tier, or
        waiting writes, without any delay.

        Publishes only hits.
        """
        started = time.perf_counter()
        first = self._in_memory[0]
        kv = first.get(key)
        if kv is not None:
            self._publish_loaded(first.name, kv, time.perf_counter() - started)
            return kv
        epoch = self._delete_epoch()
        kv = self._host.get(key)
        if kv is None:
            stored = self._waiting(key)
            if stored is None:
                return None
            kv = self._residence.resident(stored)
            self._promote(key, kv, None, [self._host], epoch)
        if self._device is not None:
            kv = self._copy_up(self._device, key, kv, epoch)
        self._publish_loaded(self._host.name, kv, time.perf_counter() - started)
        return kv

    def load(
        self, keys: Sequence[str], urgency: Urgency, *, ahead: bool = False
    ) -> list[Future[KV | None]]:
        """Load the chunks of one prompt: each future gets the result of ``get``, as soon as enough
        of its layers are there to begin with. It also gets None for chunks that would take longer
        to load than to compute, or arrive too late.

        ``urgency`` is that of all the chunks together; ``ahead``: no request waits for them yet.
        All tiers after the first are read in threads of the store's own.
        """
        share = urgency.prefill / max(1, len(keys))
        prefill = math.inf if urgency.decided else share
        futures: list[Future[KV | None]] = []
        missing = []
        for key in keys:
            kv = self.get_resident(key)
            if kv is not None:
                futures.append(completed(kv))
                continue
            chunk = self._chunk_load(key, prefill)
            futures.append(chunk.begun)
            if not chunk.begun.done():
                missing.append(chunk)
        if missing:
            self._loader.load(missing, replace(urgency, prefill=share * len(missing)), ahead=ahead)
        return futures

    def load_time(self, keys: Sequence[str]) -> LoadTime | None:
        """Return the expected time of reading these chunks, each from the fastest tier that has it;
        None if such a tier has not been measured. Chunks in memory, or in no tier, take no time.
        Does not count as a use."""
        reads: list[tuple[str, int]] = []
        for key in set(keys):
            if not self.is_resident(key):
                sizes = ((tier.name, tier.nbytes(key)) for tier in self._slower)
                reads += islice(((tier, nbytes) for tier, nbytes in sizes if nbytes is not None), 1)
        return self.bandwidths.time(reads)

    def load_ahead(self, keys: Sequence[str]) -> None:
        """Read these chunks into memory for the next prompt. As no request waits for them now,
        those of one prompt at a time are loaded; meanwhile, others are left out."""
        if all(future.done() for future in self._ahead):
            self._ahead = self.load(keys, Urgency(), ahead=True)

    def open(self, key: str) -> OpenedChunk | None:
        """Open a copy in the fastest tier that has one, to be read layer by layer and closed;
        counts as a use.

        Publishes one ChunkLookup.
        """
        for tier in self._tiers:
            reader = tier.open(key)
            if reader is not None:
                self._events.publish(ChunkLookup(hit=True, tier=tier.name))
                return OpenedChunk(tier.name, reader)
        self._events.publish(ChunkLookup(hit=False, tier="none"))
        return None

    def keep_prefixes(self, computation: str) -> SpilledPrefixes | None:
        """Return the keeper of the KV of prefixes on the disk tier's disk, until the store is
        closed; None without such a tier. ``computation`` identifies all that their KV depends on
        beside prompts. To be called once, by the engine. Raises StoreError."""
        if self._disk is not None:
            self._prefixes = SpilledPrefixes(
                self._disk, self._events, self.throttle, self._speeds, computation=computation
            )
        return self._prefixes

    def forget_prefixes(self) -> None:
        """Remove the prefixes' KV that processes which have ended have left to others."""
        if self._disk is not None:
            remove_leftovers(self._disk.directory, older_than=-math.inf)

    @property
    def spilled_bytes(self) -> int:
        """The bytes of prefixes on disk, in addition to those of the disk tier's chunks."""
        return 0 if self._prefixes is None else self._prefixes.used_bytes

    @property
    def bandwidths(self) -> Bandwidths:
        """The measured bandwidths of the tiers."""
        return self._loader.bandwidths

    def is_resident(self, key: str) -> bool:
        """Return whether ``get_resident`` would find the chunk. Does not count as a use."""
        for tier in self._in_memory:
            if tier.contains(key):
                return True
        return self._waiting(key) is not None

    def tier_of(self, key: str) -> str | None:
        """Return the name of the fastest tier that has the chunk. Does not count as a use."""
        for tier in self._in_memory:
            if tier.contains(key):
                return tier.name
        if self._waiting(key) is not None:
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

    def leftover_keys(self) -> frozenset[str]:
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

    def put(self, key: str, kv: ChunkKV) -> ChunkKV:
        """Keep the KV, which ``get`` finds from now on, and return its resident form. The caller
        must not modify either any more. A tier that has the chunk keeps its copy; but KV with
        scores takes the place of a copy without."""
        kept = self._residence.resident(kv)
        with self._lock:
            if kv.scores is not None:
                for tier in reversed(self._in_memory):  # else a reader would copy it up again
                    if lacks_scores(tier, key):
                        tier.delete(key)
            self._place(key, kept, kv, self._tiers, adds_scores=kv.scores is not None)
        return kept

    def make_room(self, key: str, nbytes: int) -> bool:
        """Evict from the disk's tier for a file of ``nbytes`` bytes that another process will
        write; return whether the file then fits."""
        return self._disk is not None and self._disk.make_room(key, nbytes)

    def take(self, key: str) -> ChunkKV | None:
        """Return the KV of a file that another process has written to the disk's tier, and remove
        it; None if there is none. No other tier ever has it."""
        if self._disk is None:
            return None
        kv = self._disk.get(key)
        self._disk.delete(key)
        return kv

    def share(self, key: str) -> None:
        """Bring a chunk whose file another process has written to the shared tiers that lack it, in
        the background."""
        epoch = self._delete_epoch()
        lacking = [tier for tier in self._tiers if tier.shared and not tier.contains(key)]
        kv = self._disk.get(key) if lacking and self._disk is not None else None
        if kv is not None:
            resident = self._residence.resident(kv)
            self._promote(key, resident, kv, (self._host, *lacking), epoch)

    def delete(self, key: str) -> bool:
        """Remove the chunk from all tiers; return whether its bytes are gone from all of them (see
        ``Tier.delete``). It comes back only by a ``put`` that has not returned before this call.

        Waits for the background threads that are just writing this chunk.
        """
        with self._lock:
            self._deletes_running += 1
        try:
            if self._device is not None:
                self._device.delete(key)
            gone = [self._host.delete(key)]
            for writer in self._writers.values():
                writer.cancel(key)
            gone += [tier.delete(key) for tier in self._slower]
            return all(gone)
        finally:
            with self._lock:
                self._deletes_running -= 1
                self._deletes_done += 1

    def flush(self) -> None:
        """Wait until every put so far has reached, or been refused by, the slower tiers."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Finish the writes under way, those to shared tiers only as far as that takes a few
        seconds, and close the tiers. Runs at interpreter exit if it was not called. Idempotent."""
        atexit.unregister(self.close)
        self._loader.close()
        if self._prefixes is not None:
            self._prefixes.close()
        deadline = time.monotonic() + SHARED_TIERS_CLOSE_SECONDS
        for tier in self._slower:
            self._writers[tier.name].close(deadline if tier.shared else None)
        for tier in self._all_tiers:
            tier.close()

    def _place(
        self,
        key: str,
        kv: ChunkKV,
        stored: ChunkKV | None,
        tiers: Sequence[Tier],
        *,
        adds_scores: bool = False,
    ) -> None:
        """Store the resident form into the first of the tiers, the store's first, now, and what is
        ``stored`` into the rest later, as ``put`` does; the lock is held."""
        if stored is not None:
            for tier in tiers[1:]:
                if not self._writers[tier.name].add(key, stored, adds_scores=adds_scores):
                    logger.warning(
                        "Chunk %s stays out of the slower tier %s: too many writes wait already",
                        key,
                        tier.name,
                    )
        tiers[0].put(key, kv)

    def _copy_up(self, device: DeviceTier, key: str, kv: ChunkKV, epoch: int | None) -> ChunkKV:
        """Return the KV on the device, kept there unless a delete came in between; where there is
        no room for it, the KV as it is."""
        copied = device.copied(kv)
        if copied is None:
            return kv
        with self._lock:
            if epoch is not None and epoch == self._delete_epoch():
                device.put(key, copied)
        return copied

    def _chunk_load(self, key: str, prefill_seconds: float) -> ChunkLoad:
        """Return the load of a chunk that is not in memory: missed already, or to be read from a
        tier that delivers it in the time in which it could be computed."""
        epoch = self._delete_epoch()
        tiers = [
            tier
            for tier in self._slower
            if (nbytes := tier.nbytes(key)) is not None
            and self.bandwidths.worth_loading(tier.name, nbytes, prefill_seconds)
        ]
        chunk = ChunkLoad(key, partial(self._open, key, tiers))
        chunk.ended.add_done_callback(lambda ended: self._loaded(key, epoch, ended.result()))
        if not tiers:
            chunk.end(None)
        return chunk

    def _open(
        self, key: str, tiers: Sequence[Tier], tried: Set[str]
    ) -> OpenedChunk | LoadedChunk | None:
        """Open a copy in the first of the tiers that has one and was not tried, or find it in
        memory meanwhile."""
        kv = self._host.get(key)
        if kv is not None:
            return LoadedChunk(self._host.name, kv, 0.0)
        for tier in tiers:
            reader = None if tier.name in tried else tier.open(key)
            if reader is not None:
                return OpenedChunk(tier.name, reader)
        return None

    def _loaded(self, key: str, epoch: int | None, loaded: LoadedChunk | None) -> None:
        """Promote and publish the result of a lookup in the slower tiers, if any."""
        if loaded is None:
            self._events.publish(ChunkLookup(hit=False, tier="none"))
            return
        if loaded.tier != self._host.name:
            others = [tier for tier in self._tiers if tier.name != loaded.tier]
            self._promote(key, loaded.kv, loaded.stored, others, epoch)
        self._publish_loaded(loaded.tier, loaded.kv, loaded.seconds)

    def _publish_loaded(self, tier: str, kv: ChunkKV, seconds: float) -> None:
        self._events.publish(ChunkLookup(hit=True, tier=tier))
        self._events.publish(ChunkLoaded(tier, seconds, kv.nbytes))

    def _delete_epoch(self) -> int | None:
        """Return a number that names the time between two deletes; None during one."""
        with self._lock:
            return None if self._deletes_running else self._deletes_done

    def _promote(
        self,
        key: str,
        kv: ChunkKV,
        stored: ChunkKV | None,
        tiers: Sequence[Tier],
        epoch: int | None,
    ) -> None:
        """Store KV that was just loaded into other tiers, unless it was deleted in between: it must
        not undo that."""
        with self._lock:
            if tiers and epoch is not None and epoch == self._delete_epoch():
                self._place(key, kv, stored, tiers)

    def _waiting(self, key: str) -> ChunkKV | None:
        for writer in self._writers.values():
            kv = writer.get(key)
            if kv is not None:
                return kv
        return None

    def _keys(self, tiers: Sequence[Tier]) -> frozenset[str]:
        waiting = [writer.keys() for writer in self._writers.values()]
        return frozenset().union(*waiting, *(tier.keys() for tier in tiers))
