"""Texts of cached chunks: reads them from their token ids, and searches them if the settings enable
it: by words, and by meaning if there is an embedding model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.texts import SearchHit
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.service.embedding import BATCH_TEXTS, Embedder
from kvlinker.store import Catalog

INDEXED_AT_ONCE = 500
"""The most chunks whose texts one transaction adds to the search index."""

MOST_CANDIDATES = 100
"""The best matches by words, and by meaning, of which the best of both are made."""

RANK_OFFSET = 60
"""Added to a rank before its reciprocal counts (Cormack et al., 2009), so that high ranks in both
lists count more than the first rank in one."""


PATIENCE = 1.0
"""The longest wait of a search for vectors that are being computed, in seconds."""

logger = logging.getLogger(__name__)


class ChunkVectors:
    """The vectors of one model's chunks, by one embedding model. All methods may be called from any
    thread.

    A separate thread computes missing vectors, also of chunks that were cached before this
    embedding model was set. The catalog keeps vectors by the embedding model's fingerprint, so
    those of another are never used.
    """

    def __init__(
        self,
        catalog: Catalog,
        embedder: Embedder,
        decode: Callable[[tuple[int, ...]], str],
        *,
        fingerprint: str,
    ) -> None:
        self._catalog = catalog
        self._embedder = embedder
        self._decode = decode
        self._fingerprint = fingerprint
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-vectors")
        self._behind = True  # there may be chunks that were not noted
        self._closing = False

    def index(self, texts: Mapping[str, str]) -> None:
        """Enqueue texts of chunks, by chunk key, for their vectors."""
        with suppress(RuntimeError):  # closed: the next process does it
            self._filler.submit(self._guarded, lambda: self._fill(texts))

    def catch_up(self) -> None:
        """Compute vectors that may be missing: at the start, and after a failure."""
        if self._behind:
            self._behind = False
            with suppress(RuntimeError):
                self._filler.submit(self._guarded, self._fill_missing)

    def settle(self, seconds: float | None = PATIENCE) -> None:
        """Wait until all chunks noted so far have their vectors, at most ``seconds``."""
        with suppress(RuntimeError, TimeoutError):
            self._filler.submit(int).result(seconds)

    def nearest(
        self, query: str, *, tenant: str, now: float, limit: int, metadata: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return the results of ``VectorIndex.nearest`` for a query."""
        self.settle()
        return self._catalog.vectors.nearest(
            self._embedder.embed([query], "query")[0],
            embedder=self._embedder.fingerprint,
            tenant=tenant,
            fingerprint=self._fingerprint,
            now=now,
            limit=limit,
            metadata=metadata,
        )

    def close(self) -> None:
        """Leave vectors that are not computed yet to the next process. Idempotent."""
        self._closing = True
        self._filler.shutdown(cancel_futures=True)

    def _guarded(self, fill: Callable[[], None]) -> None:
        """Fill in vectors; failed ones are tried again at the next ``catch_up``."""
        try:
            fill()
        except KVLinkerError as error:
            self._behind = True
            if not self._closing:
                logger.warning("Some chunks are not found by meaning for now: %s", error.message)
        except Exception:
            self._behind = True
            logger.exception("Some chunks are not found by meaning for now")

    def _fill_missing(self) -> None:
        while not self._closing and (
            missing := self._catalog.vectors.missing(
                self._embedder.fingerprint, self._fingerprint, limit=BATCH_TEXTS
            )
        ):
            self._fill({key: self._decode(tokens) for key, tokens in missing.items()})

    def _fill(self, texts: Mapping[str, str]) -> None:
        entries = list(texts.items())
        for start in range(0, len(entries), BATCH_TEXTS):
            if self._closing:
                return
            batch = dict(entries[start : start + BATCH_TEXTS])
            vectors = self._embedder.embed(list(batch.values()), "document")
            self._catalog.vectors.add(
                self._embedder.fingerprint, dict(zip(batch, vectors, strict=True))
            )


class ChunkTexts:
    """Decodes and searches the chunks of one model. All methods may be called from any thread.

    The catalog has the token ids of every chunk, so the search index is only ever derived from
    them: texts that are missing after a crash, a server without search or a change of the
    encryption key are added by ``catch_up``.
    """

    def __init__(
        self,
        catalog: Catalog,
        encoder: TextEncoder,
        *,
        fingerprint: str,
        searchable: bool,
        embedder: Embedder | None = None,
    ) -> None:
        """Remove the search index, if there is one, where chunks are not to be ``searchable``. They
        are found by meaning, too, where there is an ``embedder``."""
        self._catalog = catalog
        self._encoder = encoder
        self._fingerprint = fingerprint
        self._searchable = searchable
        if not searchable:
            catalog.search.clear()
        self._vectors = (
            ChunkVectors(catalog, embedder, self.text, fingerprint=fingerprint)
            if embedder and searchable
            else None
        )

    def text(self, tokens: tuple[int, ...]) -> str:
        """Decode a chunk's token ids."""
        return self._encoder.decode_data(tokens)

    def index(self, chunks: Mapping[str, Chunk]) -> None:
        """Add chunks that the catalog has, given by chunk key, to the search index."""
        if self._searchable:
            self._add({key: chunk.tokens for key, chunk in chunks.items()})

    def catch_up(self) -> None:
        """Add all chunks that are not in the search index yet."""
        while self._searchable and (
            missing := self._catalog.without_text(self._fingerprint, limit=INDEXED_AT_ONCE)
        ):
            self._add(missing)
        if self._vectors is not None:
            self._vectors.catch_up()

    def _add(self, chunks: Mapping[str, tuple[int, ...]]) -> None:
        """Add the texts of chunks, given by chunk key, to what is searched."""
        texts = {key: self.text(tokens) for key, tokens in chunks.items()}
        self._catalog.search.add(texts)
        if self._vectors is not None:
            self._vectors.index(texts)

    def settle(self) -> None:
        """Wait until all chunks so far are found by meaning, where they are to be."""
        if self._vectors is not None:
            self._vectors.settle(None)

    def search(
        self, query: str, *, tenant: str, limit: int, metadata: Mapping[str, str]
    ) -> tuple[SearchHit, ...]:
        """Return the results of ``SearchIndex.search``; with an embedding model, the best of these
        and of the nearest by meaning, by the sum of reciprocal ranks. Raises InvalidRequestError,
        also where search is off."""
        if not self._searchable:
            raise InvalidRequestError(
                "Search is off, because the index would hold texts in plain. The operator turns"
                " it on with the setting search=on.",
                code="search_off",
            )
        now = time.time()
        by_words = self._catalog.search.search(
            query,
            tenant=tenant,
            fingerprint=self._fingerprint,
            now=now,
            limit=limit if self._vectors is None else MOST_CANDIDATES,
            metadata=metadata,
        )
        if self._vectors is None:
            return by_words
        by_meaning = self._vectors.nearest(
            query, tenant=tenant, now=now, limit=MOST_CANDIDATES, metadata=metadata
        )
        scores = fused([hit.id for hit in by_words], by_meaning)
        best = sorted(scores, key=scores.__getitem__, reverse=True)[:limit]
        hits = {hit.id: hit for hit in by_words}
        others = [cache_id for cache_id in best if cache_id not in hits]
        for cache_id, cache in self._catalog.get_many(others, tenant, now).items():
            text = self.text(cache.chunk.tokens)
            hits[cache_id] = SearchHit(cache_id, 0.0, text, cache.tokens, cache.metadata)
        return tuple(
            replace(hits[cache_id], score=scores[cache_id]) for cache_id in best if cache_id in hits
        )

    def close(self) -> None:
        """Leave texts that are not in the index yet to the next process. Idempotent."""
        if self._vectors is not None:
            self._vectors.close()


def fused(*rankings: Sequence[str]) -> dict[str, float]:
    """Return a score for each id of some rankings, the sum of its reciprocal ranks in them."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, each in enumerate(ranking, start=1):
            scores[each] = scores.get(each, 0.0) + 1 / (RANK_OFFSET + rank)
    return scores
