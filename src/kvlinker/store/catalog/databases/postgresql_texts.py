"""Keeps the texts of chunks in PostgreSQL's tables, and ranks them by BM25 as SQLite's FTS5 does:
the same words, the same stems, the same formula."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvlinker.store.catalog.databases.interface import Connection, Database
from kvlinker.store.catalog.databases.sqlite_texts import TOKENIZE

TEXT_TABLES = (
    """CREATE TABLE texts (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        tenant TEXT NOT NULL,
        key TEXT NOT NULL UNIQUE REFERENCES chunks (key) ON DELETE CASCADE,
        text TEXT NOT NULL,
        length BIGINT NOT NULL  -- words
    )""",
    "CREATE INDEX texts_by_tenant ON texts (tenant, length)",
    """CREATE TABLE words (
        tenant TEXT NOT NULL,
        word TEXT NOT NULL,
        number BIGINT NOT NULL REFERENCES texts (number) ON DELETE CASCADE,
        times BIGINT NOT NULL,  -- that the text has the word
        PRIMARY KEY (tenant, word, number)
    )""",
    "CREATE INDEX words_by_text ON words (number)",
)

LONGEST_WORD = 256
"""The most characters of a word: an index of PostgreSQL takes some 2,700 bytes."""

_FIND = """WITH counted AS (
        SELECT count(*)::float8 AS texts, avg(length)::float8 AS length FROM texts
        WHERE tenant = :tenant
    ), asked AS (
        SELECT word, count(*) AS asked
        FROM jsonb_array_elements_text(CAST(:words AS jsonb)) AS each(word) GROUP BY word
    ), weighed AS MATERIALIZED (
        SELECT word, asked * greatest(ln((texts - n + 0.5) / (n + 0.5)), 1e-6) AS weight
        FROM asked, counted, LATERAL (
            SELECT count(*) AS n FROM words w WHERE w.tenant = :tenant AND w.word = asked.word
        ) AS found
    ), ranked AS (
        SELECT t.number, t.key, t.text, sum(
            weight * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * t.length / counted.length))
        ) AS score
        FROM weighed JOIN words w ON w.tenant = :tenant AND w.word = weighed.word
        JOIN texts t ON t.number = w.number JOIN counted ON true
        GROUP BY t.number
    )
    SELECT h.id, r.score, r.text, k.length, h.metadata FROM ranked r
    JOIN chunks k ON k.key = r.key AND k.fingerprint = :fingerprint
    JOIN context_caches h ON h.number = (
        SELECT max(c.number) FROM context_caches c WHERE c.chunk_key = k.key AND {condition}
    )
    ORDER BY r.score DESC, r.number LIMIT :limit"""
"""FTS5's BM25: k1 = 1.2, b = 0.75, and no weight below a millionth."""


class PostgresTexts:
    """PostgreSQL implementation of Texts. Foreign keys delete a text with its chunk."""

    def __init__(self) -> None:
        self._words = Words()

    def insert(self, connection: Connection, tenant: str, chunk_key: str, text: str) -> int:
        times = self._words.count(text)
        (number,) = connection.execute(
            "INSERT INTO texts (tenant, key, text, length) VALUES (?, ?, ?, ?) RETURNING number",
            (tenant, chunk_key, text.replace("\0", " "), sum(times.values())),
        ).fetchone()
        connection.executemany(
            "INSERT INTO words VALUES (?, ?, ?, ?)",
            [(tenant, word, number, count) for word, count in times.items()],
        )
        return int(number)

    def remove(self, connection: Connection, tenant: str, number: int | None) -> None:
        """Do nothing: the text went with its chunk."""

    def remove_all(self, connection: Connection) -> bool:
        removed = connection.execute("DELETE FROM texts RETURNING number").fetchall()
        connection.execute("UPDATE chunks SET text_number = NULL WHERE text_number IS NOT NULL")
        return bool(removed)

    def find(
        self,
        database: Database,
        words: Sequence[str],
        *,
        tenant: str,
        fingerprint: str,
        condition: str,
        values: Mapping[str, Any],
        limit: int,
    ) -> Sequence[Any]:
        stems = self._words.count(" ".join(words))
        return database.query(
            _FIND.format(condition=condition),
            {
                **values,
                "tenant": tenant,
                "fingerprint": fingerprint,
                "words": json.dumps([word for word, times in stems.items() for _ in range(times)]),
                "limit": limit,
            },
        )


class Words:
    """Splits texts into words as SQLite's FTS5 does, by an FTS5 table in memory that is emptied
    after each text. May be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute(
            f"CREATE VIRTUAL TABLE texts USING fts5(text, content = '', tokenize = '{TOKENIZE}')"
        )
        self._connection.execute("CREATE VIRTUAL TABLE terms USING fts5vocab(texts, 'row')")

    def count(self, text: str) -> Counter[str]:
        """Return how often the text has each of its words, by stem; of one that is longer than any
        language's, its beginning."""
        with self._lock:
            self._connection.execute("INSERT INTO texts (rowid, text) VALUES (1, ?)", (text,))
            try:
                counts: Counter[str] = Counter()
                for word, times in self._connection.execute("SELECT term, cnt FROM terms"):
                    counts[word[:LONGEST_WORD]] += times
                return counts
            finally:
                self._connection.execute("INSERT INTO texts (texts) VALUES ('delete-all')")
