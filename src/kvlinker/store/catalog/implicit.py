"""Finds context caches by the content of their chunks, and keeps implicit ones, which prompts
create."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvlinker.base.errors import QuotaExceededError
from kvlinker.base.types.chunks import ContextCache, Origin
from kvlinker.base.types.tenants import SHARED_TENANT
from kvlinker.store.catalog.blobs import TokenBlobs
from kvlinker.store.catalog.databases.interface import Connection, Database
from kvlinker.store.catalog.limits import Limits
from kvlinker.store.catalog.room import Room, make_room
from kvlinker.store.catalog.rows import (
    CHUNK,
    CHUNK_COLUMNS,
    COLUMNS,
    LIVE,
    insert_rows,
    read_genuine,
    read_tokens,
)


class Entered(NamedTuple):
    """Holds the context cache of a chunk that was to be entered, and what was dropped for it."""

    cache: ContextCache

    created: bool
    """False if there was one already."""

    room: Room


class ImplicitIndex:
    """Keeps implicit context caches in the catalog's file, each tenant's apart. All methods may be
    called from any thread."""

    def __init__(self, database: Database, blobs: TokenBlobs) -> None:
        self._database = database
        self._blobs = blobs

    def find(
        self, contents: Collection[str], tenant: str, fingerprint: str, now: float
    ) -> Mapping[str, Sequence[ContextCache]]:
        """Return, by content, the live context caches of chunks that say this: the tenant's, and
        shared ones. Chunks whose token ids were changed from outside are left out."""
        rows = self._database.query(
            f"SELECT {COLUMNS} FROM chunks k INDEXED BY chunks_by_content CROSS JOIN context_caches"
            " c ON c.chunk_key = k.key WHERE k.fingerprint = :fingerprint AND k.tenant IN"
            " (:tenant, :shared) AND k.content IN (SELECT value FROM json_each(:contents)) AND"
            f" {LIVE}",
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
            if (cache := read_genuine(row, self._blobs)) is not None:
                found[cache.chunk.content].append(cache)
        return found

    def tokens_since(
        self, number: int, tenant: str, fingerprint: str, *, limit: int, answers: bool = False
    ) -> tuple[int, Sequence[tuple[int, ...]]]:
        """Return the number of the last context cache, whosever it is, and the token ids of the
        chunks of those that were entered after ``number``, the tenant's and shared ones: the newest
        ``limit`` of them, the last one last. With ``answers``, those of kept answers alone.

        Chunks whose token ids were changed from outside are left out.
        """
        ((last,),) = self._database.query("SELECT coalesce(max(number), 0) FROM context_caches", {})
        if last <= number:
            return number, ()
        chosen = " AND k.origin <> :text" if answers else ""
        rows = self._database.query(
            f"SELECT {CHUNK_COLUMNS} FROM context_caches c {CHUNK} WHERE c.number > :number AND"
            " c.number <= :last AND c.tenant IN (:tenant, :shared) AND k.fingerprint ="
            f" :fingerprint{chosen} ORDER BY c.number DESC LIMIT :limit",
            {
                "number": number,
                "last": last,
                "tenant": tenant,
                "shared": SHARED_TENANT,
                "fingerprint": fingerprint,
                "text": Origin.TEXT.value,
                "limit": limit,
            },
        )
        return last, tuple(read_tokens(reversed(rows), self._blobs).values())

    def tenants_with_answers(self) -> frozenset[str]:
        """Return the tenants that have chunks of kept answers."""
        rows = self._database.query("SELECT DISTINCT tenant FROM chunks WHERE origin <> 'text'", {})
        return frozenset(tenant for (tenant,) in rows)

    def enter(
        self, records: Sequence[ContextCache], limits: Limits, *, now: float, kept: Collection[str]
    ) -> Sequence[Entered | None]:
        """Record implicit context caches in one transaction. A chunk that has a context cache of
        its tenant by now gets no other.

        Returns for each its context cache: None if there is no room that ``make_room`` can make
        without the ids in ``kept`` and those before it, and where the token ids of the one that is
        there were changed from outside.
        """
        if limits.implicit_caches == 0 or not records:
            return [None] * len(records)
        entered: list[Entered | None] = []
        staying = set(kept)
        with self._database.transaction() as connection:
            for record in records:
                connection.execute("SAVEPOINT entering")
                try:
                    outcome = self._enter(connection, record, limits, now=now, kept=staying)
                except QuotaExceededError:
                    connection.execute("ROLLBACK TO entering")
                    outcome = None
                connection.execute("RELEASE entering")
                entered.append(outcome)
                staying |= set() if outcome is None else {outcome.cache.id}
        return entered

    def _enter(
        self,
        connection: Connection,
        record: ContextCache,
        limits: Limits,
        *,
        now: float,
        kept: Collection[str],
    ) -> Entered | None:
        row = connection.execute(
            f"SELECT {COLUMNS} FROM context_caches c {CHUNK} WHERE c.tenant = :tenant AND"
            f" c.chunk_key = :key AND {LIVE} ORDER BY c.implicit_ttl IS NOT NULL",
            {"tenant": record.tenant, "key": record.chunk_key, "now": now},
        ).fetchone()
        if row is not None:
            cache = read_genuine(row, self._blobs)
            return None if cache is None else Entered(cache, False, Room())
        room = make_room(connection, [record], limits, now, kept=kept)
        insert_rows(connection, self._blobs, [record])
        return Entered(record, True, room)

    def extend(self, lives: Mapping[str, float], now: float) -> None:
        """Note a use of implicit context caches: by id, the seconds that each is to live from now
        at least."""
        with self._database.transaction() as connection:
            connection.executemany(
                "UPDATE context_caches SET implicit_ttl = greatest(implicit_ttl, :ttl),"
                " expires_at = greatest(expires_at, :now + greatest(implicit_ttl, :ttl))"
                " WHERE id = :id AND implicit_ttl IS NOT NULL",
                [{"id": cache_id, "ttl": ttl, "now": now} for cache_id, ttl in lives.items()],
            )

    def count_uses_until(self, now: float) -> None:
        """Set last uses that are later than ``now`` to now: the clock was set back, and they would
        outlive all others until it is there again."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE context_caches SET expires_at = :now + implicit_ttl"
                " WHERE implicit_ttl IS NOT NULL AND expires_at - implicit_ttl > :now",
                {"now": now},
            )

    def count(self, tenant: str) -> int:
        """Return how many implicit context caches the tenant has, with expired ones that remain."""
        ((count,),) = self._database.query(
            "SELECT count(*) FROM context_caches WHERE tenant = :tenant AND implicit_ttl IS NOT"
            " NULL",
            {"tenant": tenant},
        )
        return int(count)

    def total(self) -> tuple[int, int]:
        """Return how many implicit context caches there are, of all tenants, and the bytes of their
        chunks' KV as computed."""
        ((count, nbytes),) = self._database.query(
            "SELECT (SELECT count(*) FROM context_caches WHERE implicit_ttl IS NOT NULL),"
            " (SELECT CAST(coalesce(sum(nbytes), 0) AS BIGINT) FROM chunks WHERE key IN"
            " (SELECT chunk_key FROM context_caches WHERE implicit_ttl IS NOT NULL))",
            {},
        )
        return count, nbytes
