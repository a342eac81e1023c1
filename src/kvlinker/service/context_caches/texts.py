"""Texts of cached chunks: reads them from their token ids, and has them searched by words where the
settings say so."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.texts import SearchHit
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.store import Catalog

INDEXED_AT_ONCE = 500
"""The most chunks whose texts one transaction adds to the search index."""


class ChunkTexts:
    """Decodes and searches the chunks of one model. All methods may be called from any thread.

    The catalog has the token ids of every chunk, so the search index is only ever derived from
    them: what a crash, a server without search or a change of the encryption key left out of it is
    added by ``catch_up``.
    """

    def __init__(
        self, catalog: Catalog, encoder: TextEncoder, *, fingerprint: str, searchable: bool
    ) -> None:
        """Remove the search index, if there is one, where chunks are not to be ``searchable``."""
        self._catalog = catalog
        self._encoder = encoder
        self._fingerprint = fingerprint
        self._searchable = searchable
        if not searchable:
            catalog.search.clear()

    def text(self, tokens: tuple[int, ...]) -> str:
        """Decode a chunk's token ids."""
        return self._encoder.decode_data(tokens)

    def index(self, chunks: Mapping[str, Chunk]) -> None:
        """Add chunks that the catalog has, given by chunk key, to the search index."""
        if self._searchable:
            self._catalog.search.add(
                {key: self.text(chunk.tokens) for key, chunk in chunks.items()}
            )

    def catch_up(self) -> None:
        """Add all chunks that are not in the search index yet."""
        while self._searchable and (
            missing := self._catalog.without_text(self._fingerprint, limit=INDEXED_AT_ONCE)
        ):
            self._catalog.search.add({key: self.text(tokens) for key, tokens in missing.items()})

    def search(
        self, query: str, *, tenant: str, limit: int, metadata: Mapping[str, str]
    ) -> tuple[SearchHit, ...]:
        """Return what ``SearchIndex.search`` finds now. Raises InvalidRequestError, also where
        search is off."""
        if not self._searchable:
            raise InvalidRequestError(
                "Search is off here, for texts would lie in the index in plain. The operator turns"
                " it on with the setting search=on.",
                code="search_off",
            )
        return self._catalog.search.search(
            query,
            tenant=tenant,
            fingerprint=self._fingerprint,
            now=time.time(),
            limit=limit,
            metadata=metadata,
        )
