"""Computes passages that were seen once while the engine is idle, so that the second prompt that
has them finds their chunks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Event as Flag
from threading import Lock, Thread
from typing import NamedTuple

from kvlinker.base.errors import EngineClosedError, KVLinkerError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import MarkedText
from kvlinker.base.types.tenants import NO_QUOTAS, Quotas
from kvlinker.engines.contract.contract import Engine
from kvlinker.service.implicit.caches import ImplicitCaches
from kvlinker.store import Catalog, ChunkStore

MOST_WAITING = 64
"""The most prompts whose passages wait to be computed; those of more are left to their next
sight."""

MEMORY_SHARE = 0.8
"""The share of memory that may be full when one more passage is computed: nothing is evicted for a
passage that may not be repeated."""

QUOTA_SHARE = 0.5
"""The share of its implicit context caches, and of its quota, that a tenant may have when one more
is computed."""

SETTLE_SECONDS = 0.02
"""The seconds between two looks of a caller that waits for all passages."""

logger = logging.getLogger(__name__)


class _Passages(NamedTuple):
    """Passages of one prompt, and its tenant."""

    texts: Mapping[Chunk, MarkedText]
    tenant: str


class PassagesAhead:
    """Makes chunks of passages in a thread of its own, one at a time. Methods may be called from
    any thread."""

    def __init__(
        self,
        implicit: ImplicitCaches,
        engine: Engine,
        catalog: Catalog,
        store: ChunkStore,
        *,
        most_caches: int,
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        """``most_caches``: the implicit context caches that a tenant may have; ``quotas``: what it
        may have in all."""
        self._implicit = implicit
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._most_caches = most_caches * QUOTA_SHARE
        self._quotas = quotas
        self._waiting: Queue[_Passages] = Queue(MOST_WAITING)
        self._closed = Flag()
        self._starting = Lock()
        self._thread: Thread | None = None

    def note(self, texts: Mapping[Chunk, MarkedText], *, tenant: str) -> None:
        """Enqueue chunks of one prompt; those without context caches are computed."""
        if not texts:
            return
        with suppress(Full):
            self._waiting.put_nowait(_Passages(texts, tenant))
        with self._starting:
            if self._thread is None and not self._closed.is_set():
                self._thread = Thread(target=self._work, name="kvlinker-ahead", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Wait until all passages that were noted are computed, or left to their next sight."""
        while self._waiting.unfinished_tasks and not self._closed.wait(SETTLE_SECONDS):
            pass

    def close(self) -> None:
        """Make no more. The engine is closed before, which ends its computations. Idempotent."""
        with self._starting:
            self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                passages = self._waiting.get(timeout=1)
            except Empty:
                continue
            try:
                self._make(passages)
            except EngineClosedError:
                return
            except KVLinkerError as error:
                logger.info("Passages are left to their next sight: %s", error.message)
            except Exception:
                logger.exception("Passages could not be computed ahead")
            finally:
                self._waiting.task_done()

    def _make(self, passages: _Passages) -> None:
        """Compute the chunks one by one, as long as there is room, and then have them expected
        together."""
        tenant = passages.tenant
        found = self._implicit.find(tuple(passages.texts), tenant=tenant)
        together = [each.chunk for each in found.values()]
        for chunk, text in passages.texts.items():
            if chunk in found:
                continue
            memory = self._store.usage()[0]
            full = memory.used_bytes > MEMORY_SHARE * memory.budget_bytes
            if full or not self._has_room(tenant, self._engine.kv_bytes(len(chunk))):
                break
            self._engine.cache_chunk(chunk, tenant=tenant, idle=True).result()
            self._implicit.use({chunk: text}, {}, tenant=tenant)
            together.append(chunk)
        if len(together) > len(found):
            self._engine.expect_together(together, tenant=tenant)

    def _has_room(self, tenant: str, nbytes: int) -> bool:
        """Return whether the tenant may have a chunk of ``nbytes`` bytes without losing others,
        which it has asked for and which are worth more."""
        quota, has = self._quotas.of(tenant), self._catalog.usage(tenant)
        return (
            self._catalog.implicit.count(tenant) < self._most_caches
            and (quota.caches is None or has.caches < QUOTA_SHARE * quota.caches)
            and (quota.bytes is None or has.bytes + nbytes <= QUOTA_SHARE * quota.bytes)
        )
