"""Variants of chunks: KV computed after the chunks of real prompts, when the engine has nothing
else to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from kvlinker.base.errors import CatalogUnavailableError, EngineClosedError, StoreError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.places import Background
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.capture import CaptureRequest, Reading
from kvlinker.engines.embedded.requests.request import ResultKind
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.linking.evidence import Variant
from kvlinker.prompting.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.catalog.variants import StoredVariant, VariantIndex, VariantOwner
from kvlinker.store.chunk_kv import ChunkKV

logger = logging.getLogger(__name__)


class VariantLibrary:
    """Keeps one model's variants, at most ``limit`` over all tenants. Methods may be called from
    any thread."""

    def __init__(
        self, index: VariantIndex, store: ChunkStore, *, fingerprint: str, limit: int
    ) -> None:
        self._index = index
        self._store = store
        self._fingerprint = fingerprint
        self._limit = limit

    def variants(self, chunk: Chunk, tenant: str) -> tuple[Variant, ...]:
        """Return the stored variants of a tenant's chunk."""
        found = []
        owner = VariantOwner(self._fingerprint, tenant, chunk.content)
        try:
            stored_variants = self._index.find(owner)
        except CatalogUnavailableError:
            return ()
        for stored in stored_variants:
            if self._store.tier_of(stored.key) is None:
                with suppress(StoreError):  # it is forgotten once the catalog can be written to
                    self._index.forget(stored.key)
                continue
            found.append(Variant(Chunk(chunk.tokens, stored.prefix), stored.contextualization))
        return tuple(found)

    def missing(self, prompt: Prompt, tenant: str) -> list[int]:
        """Return the indices of the prompt's chunks of which no exact KV is stored, of the first
        ones: as many as variants are kept, so that those of one prompt do not evict each other."""
        return [
            index
            for index, span in enumerate(prompt.spans[: self._limit])
            if not span.exact
            and not _has_exact(self.variants(prompt.chunks[index], tenant), prompt, index)
        ]

    def note_use(self, key: str, recomputed: float) -> None:
        """Note that a request used the variant under ``key``, and computed this share of its tokens
        again."""
        self._index.note_use(key, recomputed)

    def put(self, computed: Sequence[tuple[Chunk, ChunkKV]], tenant: str) -> None:
        """Store variants with their scores, unless no context cache holds their chunks any more;
        the least reusable variants are removed to make room."""
        records = []
        for chunk, kv in computed:
            assert kv.scores is not None, "a variant is computed with scores"
            key = chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant)
            self._store.put(key, kv)
            owner = VariantOwner(self._fingerprint, tenant, chunk.content)
            records.append((owner, StoredVariant(key, chunk.prefix, kv.scores.contextualization)))
        for key in self._index.add(records, limit=self._limit):
            self._store.delete(key)


def _has_exact(variants: Iterable[Variant], prompt: Prompt, index: int) -> bool:
    """Return whether one of the variants of a chunk was computed after just what stands before it
    in the prompt."""
    start = prompt.spans[index].start
    return any(
        len(variant.chunk.prefix) == start
        and variant.chunk.prefix == tuple(prompt.tokens_before(index))
        for variant in variants
    )


class VariantBuilder:
    """Computes missing variants when the engine is idle. Methods may be called from any thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        library: VariantLibrary,
        scheduler: Scheduler,
        background: Background,
        *,
        longest: int,
    ) -> None:
        """``longest`` is the most tokens that a prompt may have whose variants are computed."""
        self.library = library
        self._loaded = loaded
        self._scheduler = scheduler
        self._background = background
        self._longest = longest

    def offer(self, prompt: Prompt, tenant: str) -> None:
        """Enqueue the missing variants of this prompt, if any, for later requests. Returns at
        once."""
        self._background(partial(self._offer, prompt, tenant))

    def _offer(self, prompt: Prompt, tenant: str) -> None:
        """Ask for the exact KV of the prompt's chunks, which one full prefill gives, and for their
        scores."""
        try:
            missing = self.library.missing(prompt, tenant)
            if not missing or prompt.spans[missing[-1]].end > self._longest:
                return
            spans = [(span.start, span.end) for span in prompt.spans[: missing[-1] + 1]]
            self._scheduler.enter(
                CaptureRequest(
                    self._loaded,
                    [Reading(prompt.tokens[: spans[-1][1]], spans, prompt.contents)],
                    kind=ResultKind.VARIANT,
                    keep=partial(self._keep, prompt, tenant, missing),
                    identity=(prompt, tenant),
                )
            )
        except EngineClosedError:
            pass
        except Exception:
            logger.exception("Variants could not be looked up.")

    def _keep(
        self,
        prompt: Prompt,
        tenant: str,
        missing: Sequence[int],
        captured: Sequence[tuple[ChunkKV, ...]],
    ) -> tuple[ChunkKV, ...]:
        (kvs,) = captured
        found = [kvs[index] for index in missing]
        self._background(partial(self._put, prompt, tenant, missing, found))
        return kvs

    def _put(
        self, prompt: Prompt, tenant: str, missing: Sequence[int], kvs: Sequence[ChunkKV]
    ) -> None:
        """Store the KV of the missing variants, in their order."""
        try:
            self.library.put(list(zip(map(prompt.variant, missing), kvs, strict=True)), tenant)
        except Exception:
            logger.exception("Variants could not be stored.")
