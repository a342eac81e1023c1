"""Queues writes to a slower tier for a background thread, for the chunk store and for prefixes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvlinker.base.threads import compute_serially
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.throttle import Throttle
from kvlinker.store.tiers.base import Tier, lacks_scores

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    key: str
    kv: ChunkKV
    nbytes: int

    adds_scores: bool
    """True if a copy without scores that the tier has is deleted first."""


class BackgroundWriter:
    """Writes chunks to a tier in the order in which they were added, one at a time, mostly pausing
    while the model computes.

    Chunks that are queued or being written can be read with ``get``, so that they never disappear
    in between. At most ``max_bytes`` are queued, except that one chunk of any size is taken while
    nothing else is queued.
    """

    def __init__(
        self,
        tier: Tier,
        max_bytes: int,
        throttle: Throttle,
        written: Callable[[ChunkKV], object] = lambda kv: None,
    ) -> None:
        """``written`` is called, in the background thread, with each KV that the tier stored."""
        self._tier = tier
        self._written = written
        self._throttle = throttle
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._queued: dict[str, _Write] = {}
        self._writing: _Write | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, key: str, kv: ChunkKV, *, adds_scores: bool = False) -> bool:
        """Queue a write, unless the key is queued already; return False if the queue is full or
        closed. Never waits. With ``adds_scores``, the KV replaces a queued write, and a stored copy
        without scores."""
        nbytes = kv.nbytes
        with self._changed:
            if key in self._queued and not adds_scores:
                return True
            if not self._takes(nbytes, key):
                return False
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name=f"kvlinker-{self._tier.name}-writer", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends, and no thread begins any more
                    return False
                self._thread = thread
            self._queued[key] = _Write(key, kv, nbytes, adds_scores)
            self._changed.notify_all()
            return True

    def takes(self, nbytes: int) -> bool:
        """Return whether ``add`` would accept ``nbytes`` bytes now."""
        with self._changed:
            return self._takes(nbytes)

    def get(self, key: str) -> ChunkKV | None:
        """Return the KV that is queued or being written under the key."""
        with self._changed:
            write = self._queued.get(key)
            return None if write is None else write.kv

    def keys(self) -> tuple[str, ...]:
        """Return the keys that ``get`` finds."""
        with self._changed:
            return tuple(self._queued)

    def cancel(self, key: str) -> None:
        """Drop the key's write; if it has begun, wait for its end. ``get`` stops finding the key
        immediately."""
        with self._changed:
            self._queued.pop(key, None)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._writing is None or self._writing.key != key)

    def flush(self, deadline: float | None = None) -> None:
        """Wait until everything queued is written or refused, or the ``deadline``, on the monotonic
        clock, is over."""
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: not self._queued and self._writing is None, seconds)

    def close(self, deadline: float | None = None) -> None:
        """Write the queued chunks, then end the thread. Those that are not written at ``deadline``,
        on the monotonic clock, are dropped. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        with self._changed:
            if self._queued:
                logger.warning(
                    "%d chunks were not written to tier %s in time",
                    len(self._queued),
                    self._tier.name,
                )
                self._queued.clear()

    def _takes(self, nbytes: int, key: str | None = None) -> bool:
        """Return whether there is room for ``nbytes`` bytes in addition to the writes of other
        keys; the lock is held."""
        queued_bytes = sum(write.nbytes for write in self._queued.values() if write.key != key)
        return not self._closed and (not queued_bytes or queued_bytes + nbytes <= self._max_bytes)

    def _run(self) -> None:
        compute_serially()
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for one write and do it; False when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._closed)
            if not self._queued:
                return False
            write = next(iter(self._queued.values()))
            self._writing = write
        try:
            if write.adds_scores and lacks_scores(self._tier, write.key):
                self._tier.delete(write.key)
            if self._tier.put(write.key, write.kv, self._throttle.rests()):
                self._written(write.kv)
        except Exception:
            logger.exception("Chunk %s was not written to tier %s", write.key, self._tier.name)
        with self._changed:
            self._writing = None
            if self._queued.get(write.key) is write:
                del self._queued[write.key]
            self._changed.notify_all()
        return True
