"""Finds context caches by what their chunks say, and keeps those that prompts brought: implicit ones."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvlinker.errors import QuotaExceededError
from kvlinker.store.catalog.database import Database
from kvlinker.store.catalog.encryption import TokenBlobs
from kvlinker.store.catalog.limits import Limits, check_added
from kvlinker.store.catalog.releases import release
from kvlinker.store.catalog.rows import CHUNK, COLUMNS, LIVE, insert_rows, read_row
from kvlinker.types.chunks import Chunk
from kvlinker.types.context_cache import ContextCache
from kvlinker.types.tenants import SHARED_TENANT


class Entered(NamedTuple):
    """The context cache of a chunk that was to be entered, and what had to go for it."""

    cache: ContextCache

    created: bool
    """False if there was one already."""

    evicted: int
    """The number of implicit context caches that had to go for it."""

    released: tuple[str, ...]
    """Chunk keys that no context cache holds any more, as ``Catalog.delete`` returns them."""


class ImplicitIndex:
    """Keeps implicit context caches in the catalog's file, each tenant's apart. All methods may be called from any
    thread."""

    def __init__(self, database: Database, blobs: TokenBlobs) -> None:
        self._database = database
        self._blobs = blobs

    def find(
        self, contents: Collection[str], tenant: str, fingerprint: str, now: float
    ) -> Mapping[str, Sequence[ContextCache]]:
        """Return, by content, the live context caches of chunks that say this: the tenant's, and shared ones."""
        rows = self._database.query(
            f"SELECT {COLUMNS} FROM chunks k INDEXED BY chunks_by_content CROSS JOIN context_caches c"
            " ON c.chunk_key = k.key WHERE k.fingerprint = :fingerprint AND k.tenant IN (:tenant, :shared)"
            f" AND k.content IN (SELECT value FROM json_each(:contents)) AND {LIVE}",
            {
                "fingerprint": fingerprint,
                "tenant": tenant,
                "shared": SHARED_TENANT,
                "contents": json.dumps(list(contents)),
                "now": now,
            },
        )
        found: defaultdict[str, list[ContextCache]] = defaultdict(list)
        for row in rows:
            cache = read_row(row, self._blobs)
            found[cache.chunk.content].append(cache)
        return found

    def chunks_since(self, number: int, tenant: str, fingerprint: str, *, limit: int) -> tuple[int, list[Chunk]]:
        """Return the number of the last context cache, whosever it is, and the chunks of those that were entered after
        ``number``, the tenant's and shared ones: the newest ``limit`` of them, the last one last."""
        ((last,),) = self._database.query(
            "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'context_caches'", {}
        )
        if last <= number:
            return number, []
        rows = self._database.query(
            f"SELECT {COLUMNS} FROM context_caches c {CHUNK} WHERE c.number > :number AND c.number <= :last"
            " AND c.tenant IN (:tenant, :shared) AND k.fingerprint = :fingerprint ORDER BY c.number DESC LIMIT :limit",
            {
                "number": number,
                "last": last,
                "tenant": tenant,
                "shared": SHARED_TENANT,
                "fingerprint": fingerprint,
                "limit": limit,
            },
        )
        return last, [read_row(row, self._blobs).chunk for row in reversed(rows)]

    def enter(
        self, record: ContextCache, limits: Limits, *, now: float, most: int, kept: Collection[str]
    ) -> Entered | None:
        """Record an implicit context cache, unless its tenant has one of this chunk by now.

        Returns None where there is no room.
        A tenant has at most ``most`` implicit ones. Those that were used longest ago make room, but for the ids in
        ``kept``.
        """
        with self._database.transaction() as connection:
            row = connection.execute(
                f"SELECT {COLUMNS} FROM context_caches c {CHUNK}"
                f" WHERE c.tenant = :tenant AND c.chunk_key = :key AND {LIVE} ORDER BY c.implicit_ttl IS NOT NULL",
                {"tenant": record.tenant, "key": record.chunk_key, "now": now},
            ).fetchone()
            if row is not None:
                return Entered(read_row(row, self._blobs), False, 0, ())
            oldest = _oldest(connection, record.tenant, kept)
            count = before = _count(connection, record.tenant)
            gone: list[str] = []
            connection.execute("SAVEPOINT before")
            for number in [*oldest, None]:
                if count < most and _fits(connection, record, limits):
                    insert_rows(connection, self._blobs, [record])
                    return Entered(record, True, before - count, tuple(gone))
                if number is not None:
                    gone += _remove(connection, [number], now)
                    count -= 1
            connection.execute("ROLLBACK TO before")
            return None

    def extend(self, lives: Mapping[str, float], now: float) -> None:
        """Note a use of implicit context caches: by id, the seconds that each is to live from now at least."""
        with self._database.transaction() as connection:
            connection.executemany(
                "UPDATE context_caches SET implicit_ttl = max(implicit_ttl, :ttl),"
                " expires_at = max(expires_at, :now + max(implicit_ttl, :ttl))"
                " WHERE id = :id AND implicit_ttl IS NOT NULL",
                [{"id": cache_id, "ttl": ttl, "now": now} for cache_id, ttl in lives.items()],
            )

    def total(self) -> tuple[int, int]:
        """Return how many implicit context caches there are, of all tenants, and the bytes of their chunks' KV as
        computed."""
        ((count, nbytes),) = self._database.query(
            "SELECT (SELECT count(*) FROM context_caches WHERE implicit_ttl IS NOT NULL),"
            " (SELECT coalesce(sum(nbytes), 0) FROM chunks WHERE key IN"
            " (SELECT chunk_key FROM context_caches WHERE implicit_ttl IS NOT NULL))",
            {},
        )
        return count, nbytes

    def evict(self, tenant: str, count: int, now: float) -> tuple[int, tuple[str, ...]]:
        """Remove up to ``count`` of the tenant's implicit context caches, those that were used longest ago first;
        returns how many, and the released chunk keys."""
        with self._database.transaction() as connection:
            numbers = _oldest(connection, tenant, ())[:count]
            return len(numbers), _remove(connection, numbers, now)


def _oldest(connection: sqlite3.Connection, tenant: str, kept: Collection[str]) -> list[int]:
    """Return the numbers of the tenant's implicit context caches by last use, without those in ``kept``."""
    rows = connection.execute(
        "SELECT number, id FROM context_caches WHERE tenant = ? AND implicit_ttl IS NOT NULL"
        " ORDER BY expires_at - implicit_ttl, number",
        (tenant,),
    )
    return [number for number, cache_id in rows if cache_id not in kept]


def _count(connection: sqlite3.Connection, tenant: str) -> int:
    query = "SELECT count(*) FROM context_caches WHERE tenant = ? AND implicit_ttl IS NOT NULL"
    return int(connection.execute(query, (tenant,)).fetchone()[0])


def _fits(connection: sqlite3.Connection, record: ContextCache, limits: Limits) -> bool:
    try:
        check_added(connection, [record], limits)
    except QuotaExceededError:
        return False
    return True


def _remove(connection: sqlite3.Connection, numbers: Sequence[int], now: float) -> tuple[str, ...]:
    keys = set()
    for number in numbers:
        removed = connection.execute("DELETE FROM context_caches WHERE number = ? RETURNING chunk_key", (number,))
        keys |= {key for (key,) in removed.fetchall()}
    return release(connection, keys, now)
