"""Finds chunks by the words of their texts; the catalog has one such index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.texts import SearchHit
from kvlinker.store.catalog.databases.interface import Database
from kvlinker.store.catalog.rows import SEARCHED, with_pairs

MOST_WORDS = 1000
"""The most words of a query that are searched for, the first ones: the time to parse it grows with
their square, and others wait for the database meanwhile; chosen by hand."""

MOST_BYTES = 10**6
"""The most bytes of these words in UTF-8: PostgreSQL takes just under 1 MiB of words and ends."""

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
                row = connection.execute(
                    "SELECT tenant FROM chunks WHERE key = ? AND text_number IS NULL", (key,)
                ).fetchone()
                if row is not None:
                    connection.execute(
                        "UPDATE chunks SET text_number = ? WHERE key = ?",
                        (connection.texts.insert(connection, row[0], key, text), key),
                    )

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

        A text matches that has any of the query's words; SQLite, by BM25, puts first those that
        have many and rare ones, PostgreSQL those that have many. Nothing in the query is syntax.
        ``now``: Unix seconds. Raises InvalidRequestError for a query without a word, and for
        one with more than ``MOST_BYTES`` of them.
        """
        words = list(dict.fromkeys(_WORD.findall(query)))[:MOST_WORDS]
        if not words:
            raise InvalidRequestError(
                f"'query' has no word to search for: {query!r}.", param="query"
            )
        nbytes = len("".join(words).encode())
        if nbytes > MOST_BYTES:
            raise InvalidRequestError(
                f"'query' has words of {nbytes:,} bytes; at most {MOST_BYTES:,} are searched for."
                " Send fewer.",
                param="query",
            )
        conditions, values = with_pairs(metadata)
        rows = self._database.texts.find(
            self._database,
            words,
            tenant=tenant,
            fingerprint=fingerprint,
            condition=" AND ".join([SEARCHED, *conditions]),
            values={**values, "now": now},
            limit=limit,
        )
        return tuple(
            SearchHit(cache_id, score, text, tokens, json.loads(labels))
            for cache_id, score, text, tokens, labels in rows
        )

    def clear(self) -> bool:
        """Remove all texts, and data derived from them; returns whether there were any."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM vectors")
            return connection.texts.remove_all(connection)
