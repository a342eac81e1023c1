"""Creates context caches: encodes the texts, has the engine compute their KV, and enters them in
the catalog."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from kvlinker.base.errors import (
    ContextLengthError,
    InvalidRequestError,
    QuotaExceededError,
)
from kvlinker.base.events import ChunkNamed, Events, ImplicitEvicted
from kvlinker.base.futures import gather
from kvlinker.base.types.chunks import Chunk, GenerationContext, chunk_key, salted
from kvlinker.base.types.limits import MAX_CHUNKS
from kvlinker.base.types.residency import lines_of, text_name
from kvlinker.base.types.tenants import SHARED_TENANT, UNLIMITED
from kvlinker.engines.contract.contract import Engine
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.service.context_caches.maintenance import Maintenance
from kvlinker.service.context_caches.texts import ChunkTexts
from kvlinker.store import (
    Catalog,
    ChunkStore,
    ContextCache,
    Limits,
    Room,
    StoreError,
    new_context_cache_id,
)
from kvlinker.store.chunk_kv import ChunkKV, LayerKV

MOST_NAMES = 16
"""The most names by which routers know an answer, in addition to its id."""

Metadata = Mapping[str, str] | Sequence[Mapping[str, str]]
"""The metadata of several context caches: one for all of them, or one for each in order."""


class Creation:
    """Creates context caches for owners, who are tenants or ``SHARED_TENANT``. Calls may come from
    any thread."""

    def __init__(
        self,
        *,
        model: str,
        builder: PromptBuilder,
        engine: Engine,
        catalog: Catalog,
        store: ChunkStore,
        texts: ChunkTexts,
        limits: Limits,
        maintenance: Maintenance,
        events: Events,
        shares: Callable[[], object] | None = None,
    ) -> None:
        """``shares`` makes computed chunks available to other servers, and is called before they
        learn of them."""
        self._model = model
        self._builder = builder
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._texts = texts
        self._limits = limits
        self._maintenance = maintenance
        self._deletions = maintenance.deletions
        self._events = events
        self._shares = shares
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-catalog")

    def begin(
        self,
        texts: Sequence[str],
        *,
        owner: str,
        expires_at: float | None,
        ttl: float | None,
        name: str | None,
        metadata: Metadata | None,
        context: GenerationContext | None,
        pinned: bool,
        advance: Callable[[], object],
    ) -> Future[tuple[ContextCache, ...]]:
        """Begin what ``ContextCaches.create`` returns. Raises its errors, except that for missing
        rights."""
        if not 0 < len(texts) <= MAX_CHUNKS:
            raise InvalidRequestError(
                f"'chunks' must hold 1 to {MAX_CHUNKS} texts, but holds {len(texts)}.",
                param="chunks",
            )
        labels = _labels(metadata, len(texts))
        shared = owner == SHARED_TENANT
        chunks = [
            replace(self._encoded(index, text, context), shared=shared)
            for index, text in enumerate(texts)
        ]
        created = time.time()
        records = tuple(
            replace(
                self._describe(chunk, owner=owner, created_at=created, expires_at=expires_at),
                name=name,
                metadata=label,
                pinned=pinned,
            )
            for chunk, label in zip(chunks, labels, strict=True)
        )
        if pinned or self._limits.quotas.of(owner) != UNLIMITED:
            self._catalog.check_room(records, self._limits, now=created)
        entered: Future[tuple[ContextCache, ...]] = Future()
        keys = [record.chunk_key for record in records]
        self._deletions.protect(keys)
        try:
            begun = [self._engine.cache_chunk(chunk, tenant=owner) for chunk in chunks]
            for each in begun:
                each.add_done_callback(lambda _: advance())
            computed = gather(begun, len)
        except BaseException:
            self._deletions.unprotect(keys)
            raise
        computed.add_done_callback(lambda done: self._computed(done, records, ttl, entered))
        return entered

    def enter_implicit(
        self, lives: Mapping[Chunk, float], *, owner: str, kept: Collection[str]
    ) -> dict[Chunk, tuple[ContextCache, bool]]:
        """Enter implicit context caches in the catalog, which live the seconds in ``lives`` from
        their last use. A chunk that has a context cache of the owner by now gets no other. Returns
        the context caches, and whether each is new.

        Expired context caches make room, then the least recently used implicit ones, except the ids
        in ``kept``. Where that is not enough, a chunk is missing in the result. The KV is computed
        when a prompt first needs it.
        """
        now = time.time()
        records = [
            replace(
                self._describe(chunk, owner=owner, created_at=now, expires_at=now + ttl),
                implicit_ttl=ttl,
            )
            for chunk, ttl in lives.items()
        ]
        entered = self._catalog.implicit.enter(records, self._limits, now=now, kept=kept)
        for each in entered:
            if each is not None:
                self._drop(each.room)
        return {
            chunk: (each.cache, each.created)
            for chunk, each in zip(lives, entered, strict=True)
            if each is not None
        }

    def keep_answer(
        self, chunk: Chunk, kv: ChunkKV, *, text: str, owner: str, ttl: float
    ) -> ContextCache | None:
        """Make an implicit context cache of an answer, which says ``text``, with the KV that it was
        generated with; it lives ``ttl`` seconds from its last use. Returns the one that the owner
        has of just this chunk by now, and None if there is no room for one. It outlasts a power
        cut; its KV may have to be computed again then."""
        now = time.time()
        record = replace(
            self._describe(chunk, owner=owner, created_at=now, expires_at=now + ttl),
            implicit_ttl=ttl,
        )
        keys = [record.chunk_key]
        if self._limits.quotas.of(owner) != UNLIMITED and self._catalog.unheld(keys):
            try:  # before its KV drives out others', in vain
                self._catalog.check_room([record], self._limits, now=now)
            except QuotaExceededError:
                return None
        self._deletions.protect(keys)
        try:
            self._store.put(record.chunk_key, kv)
            (entered,) = self._catalog.implicit.enter([record], self._limits, now=now, kept=())
        finally:
            self._deletions.unprotect(keys)
        if entered is None:
            self._deletions.drop(keys)
            return None
        self._catalog.persist()
        self._drop(entered.room)
        names = (text_name(part, owner) for part in (text, *lines_of(text)))
        named = (entered.cache.id, *islice(names, MOST_NAMES))
        self._events.publish(ChunkNamed(record.chunk_key, named, record.tenant))
        return entered.cache

    def keep_part(
        self, chunk: Chunk, whole: str, first: int, *, text: str, owner: str, ttl: float
    ) -> ContextCache | None:
        """Make an implicit context cache of those tokens of the chunk with the key ``whole`` that
        begin with the one at index ``first``, with their KV. Returns what ``keep_answer`` does, and
        None if the KV is in no tier, or has states, which cannot be divided."""
        kv = self._store.get_computed(whole)
        if kv is None or kv.states:
            return None
        tokens = slice(first, first + len(chunk))
        layers = (
            LayerKV.of_parts([part[:, tokens].contiguous() for part in layer.parts])
            for layer in kv.layers
        )
        part = ChunkKV(tuple(layers), tokens=len(chunk))
        return self.keep_answer(chunk, part, text=text, owner=owner, ttl=ttl)

    def close(self) -> None:
        """Finish the creations under way."""
        self._writer.shutdown()

    def _describe(
        self, chunk: Chunk, *, owner: str, created_at: float, expires_at: float | None
    ) -> ContextCache:
        """Describe a new context cache of a chunk, under a new id. Times are in Unix seconds."""
        return ContextCache(
            id=new_context_cache_id(),
            tenant=owner,
            model=self._model,
            chunk=chunk,
            chunk_key=chunk_key(chunk, fingerprint=self._engine.fingerprint, tenant=owner),
            fingerprint=salted(self._engine.fingerprint, chunk.salt),
            created_at=created_at,
            expires_at=expires_at,
            kv_bytes=self._engine.kv_bytes(len(chunk)),
        )

    def _encoded(self, index: int, text: str, context: GenerationContext | None) -> Chunk:
        """Return the chunk of the text at ``index``, which errors name."""
        try:
            chunk = self._builder.encode_chunk(text, context)
            length = len(chunk.prefix) + len(chunk)
            if length > self._engine.max_model_len:
                raise ContextLengthError(
                    f"Chunk {index} has {len(chunk)} tokens ({length} with its context);"
                    f" the model takes {self._engine.max_model_len}. Shorten it, or split it into"
                    " chunks.",
                    param="chunks",
                )
            return chunk
        except InvalidRequestError as error:
            if error.param == "chunks":
                error.param = f"chunks.{index}"
            raise

    def _computed(
        self,
        computed: Future[int],
        records: tuple[ContextCache, ...],
        ttl: float | None,
        entered: Future[tuple[ContextCache, ...]],
    ) -> None:
        """Enter the records in another thread: this is the engine's, which must not wait for the
        disk."""
        try:
            self._writer.submit(self._enter, computed, records, ttl, entered)
        except BaseException as error:
            self._deletions.unprotect([record.chunk_key for record in records])
            entered.set_exception(error)

    def _enter(
        self,
        computed: Future[int],
        records: tuple[ContextCache, ...],
        ttl: float | None,
        entered: Future[tuple[ContextCache, ...]],
    ) -> None:
        keys = [record.chunk_key for record in records]
        try:
            try:
                computed.result()
                if self._shares is not None:
                    self._shares()
                # now, as computing took a while: lists that have passed would skip it, and a short
                # life would be over
                now = time.time()
                records = tuple(replace(record, created_at=now) for record in records)
                if ttl is not None:
                    records = tuple(
                        replace(record, expires_at=now + float(ttl)) for record in records
                    )
                room = self._catalog.add(records, self._limits, now=now)
            finally:
                self._deletions.unprotect(keys)
            self._catalog.persist()
            self._drop(room)
            if records[0].pinned:
                self._maintenance.pin()
            with suppress(StoreError):  # the next sweep catches up
                self._texts.index({record.chunk_key: record.chunk for record in records})
            for record in records:
                self._events.publish(ChunkNamed(record.chunk_key, (record.id,), record.tenant))
            self._engine.expect_together(
                [record.chunk for record in records], tenant=records[0].tenant
            )
            entered.set_result(records)
        except BaseException as error:
            try:
                with suppress(StoreError):
                    self._deletions.drop(keys)
            finally:
                entered.set_exception(error)

    def _drop(self, room: Room) -> None:
        """Delete the KV of chunks that the catalog dropped for others, and publish how many context
        caches were dropped."""
        self._deletions.drop(room.released)
        if room.evicted:
            self._events.publish(ImplicitEvicted(room.evicted))


def _labels(metadata: Metadata | None, count: int) -> Sequence[Mapping[str, str]]:
    """Return the metadata of each of ``count`` context caches. Raises InvalidRequestError for a
    list of another length."""
    if metadata is None or isinstance(metadata, Mapping):
        return [metadata or {}] * count
    if len(metadata) != count:
        raise InvalidRequestError(
            f"'metadata' is a list of {len(metadata)}, but there are {count} chunks. One for all,"
            " or one each.",
            param="metadata",
        )
    return metadata
