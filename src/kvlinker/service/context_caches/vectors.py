"""Keeps a vector for every chunk that is searched, outside the threads that create chunks, and
finds chunks by the meaning of a query."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvlinker.base.errors import KVLinkerError
from kvlinker.service.embedding import BATCH_TEXTS, Embedder
from kvlinker.store import Catalog

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
        """Have vectors computed of the texts of chunks, by chunk key."""
        with suppress(RuntimeError):  # closed: the next process does it
            self._filler.submit(self._guarded, lambda: self._fill(texts))

    def catch_up(self) -> None:
        """Have vectors computed that may be missing: at the start, and after a failure."""
        if self._behind:
            self._behind = False
            with suppress(RuntimeError):
                self._filler.submit(self._guarded, self._fill_missing)

    def settle(self, seconds: float | None = PATIENCE) -> None:
        """Wait until all chunks noted so far have their vectors, or for so many seconds."""
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
