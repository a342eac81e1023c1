"""Keeps context caches and their chunks' token ids in a database; ``ContextCaches`` is its
caller.

The token ids stay for as long as a context cache holds the chunk, so KV that the store evicted can
be computed again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from kvlinker.base.errors import ContextCacheNotFoundError, StoreError
from kvlinker.base.installing import install_command
from kvlinker.base.types.chunks import UNCHANGED, Chunk, ContextCache, Page, Unchanged
from kvlinker.base.types.tenants import SHARED_TENANT
from kvlinker.store.catalog.audit import AuditLog
from kvlinker.store.catalog.check import check_catalog
from kvlinker.store.catalog.databases.interface import Database, StateLock
from kvlinker.store.catalog.implicit import ImplicitIndex
from kvlinker.store.catalog.importing import Imported, import_caches, upgrade
from kvlinker.store.catalog.limits import (
    NO_LIMITS,
    PINNED_BYTES,
    TENANT_USAGE,
    Limits,
    TenantUsage,
    check_pinned,
)
from kvlinker.store.catalog.responses import ResponseLog
from kvlinker.store.catalog.room import Room, make_room, release, remove_expired
from kvlinker.store.catalog.rows import (
    BY_OWNER,
    CHUNK,
    CHUNK_COLUMNS,
    COLUMNS,
    LIVE,
    blobs_of,
    index_metadata,
    insert_rows,
    matching,
    pack_metadata,
    read_chunk,
    read_row,
    read_tokens,
)
from kvlinker.store.catalog.search import SearchIndex
from kvlinker.store.catalog.variants import VariantIndex
from kvlinker.store.catalog.vectors import VectorIndex
from kvlinker.store.format.sealing import KEY_VARIABLE

if TYPE_CHECKING:
    from kvlinker.store.format.encryption import Cipher

POSITION_SECONDS = 3600
"""The time for which a listing can go on after a context cache that was removed; chosen by hand."""

ALL = 2**62
"""The limit of unlimited figures."""


class Catalog:
    """Keeps context caches by id and tenant. Another tenant's, an expired and an unknown one are
    alike: absent.

    A context cache has expired when ``now`` (Unix seconds) reaches ``expires_at``; ``expire``
    removes those rows. Several processes may use one catalog. All methods may be called from any
    thread, and raise StoreError when the database cannot do its work, or CatalogUnavailableError
    when it cannot be reached. Their changes survive the end of the process; a power cut only after
    ``persist``.
    """

    def __init__(self, place: Path | str, cipher: Cipher | None = None) -> None:
        """Open or create the file of a path, or the tables in the PostgreSQL database of a URL;
        with a cipher, token ids are encrypted, also those that were not before. A file of an
        earlier version is upgraded.

        Raises StoreError if it is damaged, foreign, of another schema, or encrypted with another
        key.
        """
        if isinstance(place, Path):
            upgrade(place, cipher)
        self._cipher = cipher
        self._database = open_database(place)
        self._blobs = blobs_of(cipher)
        with ExitStack() as stack:
            stack.callback(self._database.close)
            lock = self._database.lock()
            stack.callback(lock.close)
            self._share(lock)
            self._close = stack.pop_all().close
        self.variants = VariantIndex(self._database, self._blobs)
        self.search = SearchIndex(self._database)
        self.vectors = VectorIndex(self._database, self._blobs)
        self.implicit = ImplicitIndex(self._database, self._blobs)
        self.responses = ResponseLog(self._database, self._blobs)
        self.audit = AuditLog(self._database)

    def add(
        self, records: Sequence[ContextCache], limits: Limits = NO_LIMITS, *, now: float = 0.0
    ) -> Room:
        """Record context caches and the chunks they hold: all of them or, on an error, none.
        Returns what was dropped for them, as ``make_room`` does; the caller deletes the KV of
        released chunks as after ``delete``.

        Raises QuotaExceededError and PinLimitError.
        """
        with self._database.transaction() as connection:
            room = make_room(connection, records, limits, now)
            insert_rows(connection, self._blobs, records)
            return room

    def check_room(
        self, records: Sequence[ContextCache], limits: Limits, *, now: float = 0.0
    ) -> None:
        """Raise the errors of ``add``, and change nothing."""
        with self._database.transaction() as connection:
            connection.execute("SAVEPOINT trial")
            make_room(connection, records, limits, now)
            connection.execute("ROLLBACK TO trial")

    def get(self, cache_id: str, tenant: str, now: float) -> ContextCache | None:
        """Return the tenant's context cache of this id, or the shared one; None if there is
        none."""
        return self.get_many([cache_id], tenant, now).get(cache_id)

    def get_many(
        self, cache_ids: Sequence[str], tenant: str, now: float
    ) -> dict[str, ContextCache]:
        """Return those of the ids that exist, the tenant's own and shared ones, by id."""
        rows = self._database.query(
            f"SELECT {COLUMNS} FROM {BY_OWNER} {CHUNK} WHERE c.tenant IN (:tenant, :shared) AND"
            f" c.id IN (SELECT value FROM json_each(:ids)) AND {LIVE}",
            {
                "ids": json.dumps(list(cache_ids)),
                "tenant": tenant,
                "shared": SHARED_TENANT,
                "now": now,
            },
        )
        return {row[0]: read_row(row, self._blobs) for row in rows}

    def list(
        self,
        tenant: str,
        now: float,
        *,
        limit: int,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> Page:
        """Return at most ``limit`` of the tenant's own context caches by time of creation: those
        that follow ``after`` where it is given, and only those with all pairs of ``metadata``.

        Pages that follow one another neither repeat nor skip an item, whatever is added or removed
        between them, the item ``after`` included. Raises ContextCacheNotFoundError if ``after``
        does not exist, or not for ``POSITION_SECONDS``.
        """
        follows, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        found = matching(tenant, metadata, now)
        condition, values, position = found.condition, dict(found.values), found.position
        if after is not None:
            cursor = self._database.query(
                f"SELECT c.created_at, c.number FROM {BY_OWNER} WHERE c.tenant = :tenant AND c.id ="
                " :id UNION ALL SELECT created_at, number FROM removed_positions WHERE tenant ="
                " :tenant AND id = :id",
                {"id": after, "tenant": tenant},
            )
            if not cursor:
                raise ContextCacheNotFoundError(after)
            values["created_at"], values["number"] = cursor[0]
            condition += f" AND ({position}) {follows} (:created_at, :number)"
        order_by = position.replace(",", f" {direction},")
        rows = self._database.query(
            f"SELECT {COLUMNS} FROM {found.tables} {CHUNK} WHERE {condition}"
            f" ORDER BY {order_by} {direction} LIMIT :limit",
            {**values, "limit": limit + 1},
        )
        return Page(
            tuple(read_row(row, self._blobs) for row in rows[:limit]), has_more=len(rows) > limit
        )

    def update(
        self,
        cache_id: str,
        tenant: str,
        now: float,
        *,
        expires_at: float | Unchanged | None = UNCHANGED,
        name: str | Unchanged | None = UNCHANGED,
        metadata: Mapping[str, str] | Unchanged = UNCHANGED,
        pinned: bool | Unchanged = UNCHANGED,
        limits: Limits = NO_LIMITS,
    ) -> ContextCache:
        """Change the given fields; returns the result. An implicit one whose lifetime is changed,
        or that is pinned, is its owner's from then on. Raises ContextCacheNotFoundError and
        PinLimitError."""
        changes = {
            "expires_at": expires_at,
            "name": name,
            "metadata": metadata if metadata is UNCHANGED else pack_metadata(metadata),
            "pinned": pinned,
        }
        changes = {column: value for column, value in changes.items() if value is not UNCHANGED}
        if "expires_at" in changes or pinned is True:
            changes["implicit_ttl"] = None
        with self._database.transaction() as connection:
            row = connection.execute(
                f"SELECT c.number, c.chunk_key FROM {BY_OWNER} WHERE c.tenant = :tenant AND c.id ="
                f" :id AND {LIVE}",
                {"id": cache_id, "tenant": tenant, "now": now},
            ).fetchone()
            if row is None:
                raise ContextCacheNotFoundError(cache_id)
            number, chunk_key = row
            if pinned is True:
                check_pinned(connection, chunk_key, tenant, limits)
            for column, value in changes.items():
                connection.execute(
                    f"UPDATE context_caches SET {column} = ? WHERE number = ?", (value, number)
                )
            if metadata is not UNCHANGED:
                connection.execute("DELETE FROM metadata WHERE number = ?", (number,))
                index_metadata(connection, {cache_id: metadata})
            changed = connection.execute(
                f"SELECT {COLUMNS} FROM context_caches c {CHUNK} WHERE c.number = ?", (number,)
            )
            return read_row(changed.fetchone(), self._blobs)

    def delete(self, cache_id: str, tenant: str, now: float) -> tuple[str, ...]:
        """Remove one context cache; returns the chunk keys that no context cache holds any more.

        The caller deletes their KV from the store; until it has, ``released`` returns them. Raises
        ContextCacheNotFoundError.
        """
        with self._database.transaction() as connection:
            removed = connection.execute(
                f"DELETE FROM {BY_OWNER} WHERE c.tenant = :tenant AND c.id = :id AND {LIVE}"
                " RETURNING chunk_key",
                {"id": cache_id, "tenant": tenant, "now": now},
            ).fetchall()
            if not removed:
                raise ContextCacheNotFoundError(cache_id)
            return release(connection, {key for (key,) in removed}, now)

    def delete_matching(
        self, tenant: str, now: float, metadata: Mapping[str, str], *, limit: int
    ) -> tuple[int, tuple[str, ...]]:
        """Remove up to ``limit`` of the tenant's context caches that have all the pairs; returns
        how many it removed, and the released chunk keys as ``delete`` does."""
        found = matching(tenant, metadata, now)
        with self._database.transaction() as connection:
            removed = connection.execute(
                f"DELETE FROM context_caches WHERE number IN (SELECT c.number FROM {found.tables}"
                f" WHERE {found.condition} LIMIT :limit) RETURNING chunk_key",
                {**found.values, "limit": limit},
            ).fetchall()
            return len(removed), release(connection, {key for (key,) in removed}, now)

    def expire(self, now: float, *, limit: int = ALL) -> tuple[int, tuple[str, ...]]:
        """Remove expired context caches of all tenants, ``limit`` at most; returns how many, and
        released chunk keys as ``delete`` does."""
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM removed_positions WHERE removed_at <= ?", (now - POSITION_SECONDS,)
            )
            return remove_expired(connection, now, limit=limit)

    def released(self, after: float, until: float, *, limit: int = ALL) -> dict[str, float]:
        """Return chunk keys that were released in this time and are held by nothing now, and when:
        any ``limit`` of them, or all."""
        rows = self._database.query(
            "SELECT key, released_at FROM released r WHERE released_at > :after AND released_at <="
            " :until AND NOT EXISTS (SELECT 1 FROM chunks WHERE key = r.key) AND NOT EXISTS (SELECT"
            " 1 FROM variants WHERE key = r.key) LIMIT :limit",
            {"after": after, "until": until, "limit": limit},
        )
        return dict(rows)

    def forget_released(self, chunk_keys: Iterable[str], until: float) -> None:
        """Forget that these were released, for no tier holds their KV; and what was released until
        then and is held again."""
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM released AS r WHERE released_at <= :until AND (key IN (SELECT value"
                " FROM json_each(:gone)) OR EXISTS (SELECT 1 FROM chunks WHERE key = r.key) OR"
                " EXISTS (SELECT 1 FROM variants WHERE key = r.key))",
                {"until": until, "gone": json.dumps(list(chunk_keys))},
            )

    def unheld(self, chunk_keys: Iterable[str]) -> tuple[str, ...]:
        """Return those of the keys that no context cache holds, directly or as a variant of its
        chunk."""
        query = (
            "SELECT 1 FROM chunks WHERE key = :key UNION SELECT 1 FROM variants WHERE key = :key"
        )
        return tuple(
            key
            for key in dict.fromkeys(chunk_keys)
            if not self._database.query(query, {"key": key})
        )

    def usage(self, tenant: str) -> TenantUsage:
        """Return the tenant's usage, including expired context caches that remain."""
        rows = self._database.query(TENANT_USAGE, {"tenant": tenant})
        return TenantUsage(*rows[0]) if rows else TenantUsage()

    def pinned_bytes(self, tenant: str) -> int:
        """Return the bytes of the tenant's KV, as computed, that is pinned; each chunk counts
        once."""
        pinned: dict[str, int] = dict(self._database.query(PINNED_BYTES, {}))
        return pinned.get(tenant, 0)

    def pinned(self) -> frozenset[str]:
        """Return the chunk keys of all pinned context caches."""
        rows = self._database.query(
            "SELECT DISTINCT chunk_key FROM context_caches WHERE pinned", {}
        )
        return frozenset(key for (key,) in rows)

    def chunk(self, chunk_key: str) -> tuple[Chunk, str, str] | None:
        """Return a chunk with its owner and its model's fingerprint; None if no context cache holds
        it, or its token ids were changed from outside. It has scores where one holds it that was
        created by name."""
        rows = self._database.query(
            f"SELECT {CHUNK_COLUMNS} FROM chunks k WHERE k.key = :key", {"key": chunk_key}
        )
        if not rows:
            return None
        named = self._database.query(
            "SELECT 1 FROM context_caches WHERE chunk_key = :key AND implicit_ttl IS NULL LIMIT 1",
            {"key": chunk_key},
        )
        chunk = read_chunk(rows[0], self._blobs, scored=bool(named))
        _, fingerprint, owner, *_ = rows[0]
        return None if chunk is None else (chunk, owner, fingerprint)

    def without_text(self, fingerprint: str, *, limit: int) -> dict[str, tuple[int, ...]]:
        """Return the token ids of up to ``limit`` of the model's chunks that are not in the search
        index, by chunk key.

        Chunks that only implicit context caches hold do not belong there. Those whose token ids
        were changed from outside are left out.
        """
        rows = self._database.query(
            f"SELECT {CHUNK_COLUMNS} FROM chunks k INDEXED BY chunks_without_text WHERE fingerprint"
            " = :fingerprint AND text_number IS NULL AND EXISTS (SELECT 1 FROM context_caches c"
            " WHERE c.chunk_key = key AND c.implicit_ttl IS NULL) LIMIT :limit",
            {"fingerprint": fingerprint, "limit": limit},
        )
        return read_tokens(rows, self._blobs)

    def tenants(self) -> tuple[str, ...]:
        """Return all tenants that have context caches, expired ones that remain included, sorted by
        name."""
        rows = self._database.query(
            "SELECT DISTINCT tenant FROM context_caches ORDER BY tenant", {}
        )
        return tuple(tenant for (tenant,) in rows)

    def keys_of(self, tenant: str) -> frozenset[str]:
        """Return the keys of the tenant's chunks and their variants."""
        rows = self._database.query(
            "SELECT key FROM chunks WHERE tenant = :tenant UNION SELECT key FROM variants WHERE"
            " tenant = :tenant",
            {"tenant": tenant},
        )
        return frozenset(key for (key,) in rows)

    def chunk_keys(self) -> dict[str, str]:
        """Return the model fingerprint of every chunk that some context cache holds, and of its
        variants, by chunk key."""
        return dict(
            self._database.query(
                "SELECT key, fingerprint FROM chunks UNION SELECT key, fingerprint FROM variants",
                {},
            )
        )

    def check(self, *, repair: bool = False) -> tuple[str, ...]:
        """Return the faults of the catalog, a line for each; with ``repair``, mend them. See
        ``check_catalog``."""
        changed = tuple(self.responses.changed())
        if repair:
            self.responses.remove(changed)
        return (
            *(f"the texts of response {key} are not what they were" for key in changed),
            *check_catalog(self._database, self._blobs, time.time(), repair=repair),
        )

    def import_from(self, source: Path) -> Imported:
        """Add the context caches of another catalog's file, as ``import_caches`` does: all of them
        or, on an error, none. Raises StoreError."""
        with self._database.transaction() as connection:
            return import_caches(source, connection, self._cipher)

    def persist(self) -> None:
        """Wait until the changes so far survive a power cut."""
        self._database.persist()

    def close(self) -> None:
        """Close the database. Idempotent; no other method may be called afterwards."""
        self._close()

    def _share(self, lock: StateLock) -> None:
        """Share the lock of a catalog that is encrypted with the cipher, or not at all without
        one. Raises StoreError if it is encrypted otherwise."""
        if self._cipher is not None:
            from kvlinker.store.catalog.encryption import open_encrypted

            open_encrypted(self._database, lock, self._cipher)
            return
        lock.share()
        if self._database.query("SELECT 1 FROM encryption", {}):
            raise StoreError(
                f"The catalog {self._database.place} is encrypted. Give its key in {KEY_VARIABLE}."
            )


def open_database(place: Path | str) -> Database:
    """Open or create the catalog's SQLite file, or its tables in the PostgreSQL database of a URL.
    Raises StoreError if it is damaged, foreign or of another schema, or cannot be reached."""
    if isinstance(place, Path):
        from kvlinker.store.catalog.databases.sqlite import SQLiteDatabase

        return SQLiteDatabase(place)
    try:
        from kvlinker.store.catalog.databases.postgresql import PostgresDatabase
    except ModuleNotFoundError as error:
        raise StoreError(
            f"catalog_url needs PostgreSQL's driver: {install_command('postgres')}."
        ) from error
    return PostgresDatabase(place)
