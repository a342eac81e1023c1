"""Presents all tiers as one chunk store: engines put and get KV here, the server deletes and
reports."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice

from kvlinker.base.events import ChunkLoaded, ChunkLookup, Events
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.inventory import Inventory
from kvlinker.store.loading.arriving import KV
from kvlinker.store.loading.bandwidths import Bandwidths, LoadTime
from kvlinker.store.loading.loader import LayerLoader
from kvlinker.store.loading.prompt_load import ChunkLoad, LoadedChunk, OpenedChunk, Urgency
from kvlinker.store.memory.resident import Residence
from kvlinker.store.next_uses import NextUses
from kvlinker.store.prefixes import SpilledPrefixes, remove_left
from kvlinker.store.speeds import Speeds
from kvlinker.store.throttle import Throttle
from kvlinker.store.tiers.base import Tier, lacks_scores
from kvlinker.store.tiers.device import DeviceTier
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.tiers.host import HostTier
from kvlinker.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)

DEFAULT_WRITE_QUEUE_BYTES = 1 << 30
SHARED_TIERS_CLOSE_SECONDS = 10.0


class ChunkStore(Inventory):
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
        super().__init__(tiers[0], tiers[1:], writers, device)
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
            remove_left(self._disk.directory)
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
        epoch = self._delete_epoch()
        started = time.perf_counter()
        if self._device is not None and (kv := self._device.get(key)) is not None:
            self._publish_loaded(self._device.name, kv, time.perf_counter() - started)
            return kv
        kv = self._host.get(key)
        if kv is None:
            stored = self._waiting(key)
            if stored is None:
                return None
            kv = self._residence.resident(stored)
            self._promote(key, kv, None, [self._host], epoch)
        if self._device is not None:
            kv = self._copied_up(self._device, key, kv, epoch)
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
        chunks = [self._begun(key, prefill) for key in keys]
        missing = [chunk for chunk in chunks if not chunk.begun.done()]
        if missing:
            self._loader.load(missing, replace(urgency, prefill=share * len(missing)), ahead=ahead)
        return [chunk.begun for chunk in chunks]

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
            remove_left(self._disk.directory, older_than=-math.inf)

    @property
    def spilled_bytes(self) -> int:
        """The bytes of prefixes on disk, in addition to those of the disk tier's chunks."""
        return 0 if self._prefixes is None else self._prefixes.used_bytes

    @property
    def bandwidths(self) -> Bandwidths:
        """The measured bandwidths of the tiers."""
        return self._loader.bandwidths

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

    def _copied_up(self, device: DeviceTier, key: str, kv: ChunkKV, epoch: int | None) -> ChunkKV:
        """Return the KV on the device, kept there unless a delete came in between; where there is
        no room for it, the KV as it is."""
        copied = device.copied(kv)
        if copied is None:
            return kv
        with self._lock:
            if epoch is not None and epoch == self._delete_epoch():
                device.put(key, copied)
        return copied

    def _begun(self, key: str, prefill_seconds: float) -> ChunkLoad:
        """Return a chunk that is found or missed already, or is to be read from a tier that
        delivers it in the time in which it could be computed."""
        epoch = self._delete_epoch()
        kv = self.get_resident(key)
        if kv is not None:
            found = ChunkLoad(key, lambda _: None)
            found.begun.set_result(kv)
            return found
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
