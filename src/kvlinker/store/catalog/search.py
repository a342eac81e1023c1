"""Finds chunks by the words of their texts; the catalog has one such index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.texts import SearchHit
from kvlinker.store.catalog.database import Database
from kvlinker.store.catalog.rows import LIVE, with_pairs
from kvlinker.store.catalog.text_tables import insert_text, remove_all_texts, table_name

MOST_WORDS = 1000
"""The most words of a query that are searched for, the first ones: the time to parse it grows with
their square, and others wait for the database meanwhile."""

_WORD = re.compile(r"\w+")


class SearchIndex:
    """Keeps the texts of chunks, and finds them by their words. All methods may be called from any
    thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, texts: Mapping[str, str]) -> None:
        """Keep the texts of chunks, by chunk key; chunks that are gone or have their text here
        already are passed over."""
        with self._database.transaction() as connection:
            for key, text in texts.items():
                insert_text(connection, key, text)

    def search(
        self,
        query: str,
        *,
        tenant: str,
        fingerprint: str,
        now: float,
        limit: int,
        metadata: Mapping[str, str],
    ) -> tuple[SearchHit, ...]:
        """Return the tenant's ``limit`` chunks that match best, each as its newest live context
        cache that has all pairs of ``metadata``; only chunks of the model with this fingerprint.

        A text matches that has any of the query's words; BM25 puts first those that have many and
        rare ones. Nothing in the query is syntax. Implicit context caches, which nobody made to be
        searched, are left out. ``now``: Unix seconds. Raises InvalidRequestError for a query
        without a word.
        """
        match = _match(query)
        table = self._table(tenant)
        if table is None:
            return ()
        conditions, values = with_pairs(metadata)
        matching = " AND ".join([LIVE, *conditions])
        rows = self._database.query(
            f"SELECT h.id, -t.rank, t.text, k.length, h.metadata FROM {table} t CROSS JOIN chunks k"
            " ON k.tenant = :tenant AND k.text_number = t.rowid AND k.fingerprint = :fingerprint"
            " CROSS JOIN context_caches h ON h.number = (SELECT max(c.number) FROM context_caches"
            f" c WHERE c.chunk_key = k.key AND c.implicit_ttl IS NULL AND {matching}) WHERE {table}"
            " MATCH :match ORDER BY t.rank LIMIT :limit",
            {
                **values,
                "tenant": tenant,
                "fingerprint": fingerprint,
                "now": now,
                "match": match,
                "limit": limit,
            },
        )
        return tuple(
            SearchHit(cache_id, score, text, tokens, json.loads(labels))
            for cache_id, score, text, tokens, labels in rows
        )

    def clear(self) -> bool:
        """Remove all texts; returns whether there were any."""
        with self._database.transaction() as connection:
            return remove_all_texts(connection)

    def _table(self, tenant: str) -> str | None:
        rows = self._database.query(
            "SELECT number FROM search_indexes WHERE tenant = :tenant", {"tenant": tenant}
        )
        return table_name(rows[0][0]) if rows else None


def _match(query: str) -> str:
    """Return FTS5's expression for texts that have any of the query's words."""
    words = list(dict.fromkeys(_WORD.findall(query)))[:MOST_WORDS]
    if not words:
        raise InvalidRequestError(f"'query' has no word to search for: {query!r}.", param="query")
    return " OR ".join(f'"{word}"' for word in words)
