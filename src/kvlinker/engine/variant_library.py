"""Variants of chunks: KV computed behind different prefixes, as policies look for it and the engine adds it."""

from __future__ import annotations

from collections.abc import Sequence

from kvlinker.chunks import Chunk, chunk_key
from kvlinker.linking.library import Variant
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.variants import StoredVariant, VariantIndex, VariantOwner


class VariantLibrary:
    """The variants of one model, at most ``limit`` over all tenants. All methods may be called from any thread."""

    def __init__(self, index: VariantIndex, store: ChunkStore, *, fingerprint: str, limit: int) -> None:
        self._index = index
        self._store = store
        self._fingerprint = fingerprint
        self._limit = limit

    def of(self, tenant: str) -> TenantVariants:
        """``Library`` of one tenant, for one request."""
        return TenantVariants(self._index, self._store, self._fingerprint, tenant)

    def missing(self, prompt: Prompt, tenant: str) -> list[int]:
        """The chunks of the prompt, by index, of whose KV no exact copy is stored."""
        library = self.of(tenant)
        missing = []
        for index, (chunk, span) in enumerate(zip(prompt.chunks, prompt.spans, strict=True)):
            if not span.exact:
                before = tuple(prompt.tokens_before(index))
                if all(variant.chunk.prefix != before for variant in library.variants(chunk)):
                    missing.append(index)
        return missing if self._limit else []

    def note_use(self, key: str, recomputed: float) -> None:
        """A request took the variant, computing this share of its tokens again."""
        self._index.note_use(key, recomputed)

    def put(self, computed: Sequence[tuple[Chunk, ChunkKV]], tenant: str) -> None:
        """Keep variants with their scores, unless no context cache holds their chunks any more; the least reusable
        ones make room."""
        records = []
        for chunk, kv in computed:
            assert kv.scores is not None, "a variant is computed with scores"
            key = chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant)
            self._store.put(key, kv)
            owner = VariantOwner(self._fingerprint, tenant, chunk.content)
            records.append((owner, StoredVariant(key, chunk.prefix, kv.scores.contextualization)))
        for key in self._index.add(records, limit=self._limit):
            self._store.delete(key)


class TenantVariants:
    """``Library`` over what is stored for one tenant."""

    def __init__(self, index: VariantIndex, store: ChunkStore, fingerprint: str, tenant: str) -> None:
        self._index = index
        self._store = store
        self._fingerprint = fingerprint
        self._tenant = tenant

    def variants(self, chunk: Chunk) -> tuple[Variant, ...]:
        found = []
        for stored in self._index.find(VariantOwner(self._fingerprint, self._tenant, chunk.content)):
            if self._store.tier_of(stored.key) is None:
                self._index.forget(stored.key)
                continue
            found.append(Variant(Chunk(chunk.tokens, stored.prefix), stored.contextualization))
        return tuple(found)
