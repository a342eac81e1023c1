"""The catalog of context caches and their chunks' token ids, in one SQLite file; the server is its caller.

The token ids stay for as long as a context cache holds the chunk, so KV that the store evicted can be computed again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvlinker.chunks import Chunk
from kvlinker.errors import ContextCacheNotFoundError
from kvlinker.store.context_cache import ContextCache
from kvlinker.store.database import Database
from kvlinker.store.token_blobs import pack_tokens, unpack_tokens
from kvlinker.store.variants import VariantIndex, release_variants

_SELECT = """SELECT c.id, c.tenant, c.model, c.name, c.metadata, c.created_at, c.expires_at, c.chunk_key,
    k.fingerprint, k.tokens, k.prefix FROM context_caches c JOIN chunks k ON k.key = c.chunk_key"""
_LIVE = "(c.expires_at IS NULL OR c.expires_at > :now)"
_IDS_PER_QUERY = 500


class Unchanged(Enum):
    """The type of ``UNCHANGED``, which tells ``Catalog.update`` to leave a field alone (None is a value)."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


class Page(NamedTuple):
    """One page of a listing; ``has_more``: further context caches follow the last item."""

    items: tuple[ContextCache, ...]
    has_more: bool


class Catalog:
    """Context caches by id and tenant. Another tenant's, an expired and an unknown one are alike: absent.

    A context cache has expired when ``now`` (Unix seconds) reaches ``expires_at``; ``expire`` removes those rows.
    Several processes may use one file. All methods may be called from any thread, and raise StoreError when SQLite
    cannot do its work.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StoreError where it is damaged, foreign or from a newer kvlinker."""
        self._database = Database(path)
        self.variants = VariantIndex(self._database)

    def add(self, records: Sequence[ContextCache]) -> None:
        """Record context caches and the chunks they hold: all of them or, on an error, none."""
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO chunks (key, fingerprint, tenant, tokens, prefix, created_at, content)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        r.chunk_key,
                        r.fingerprint,
                        r.tenant,
                        pack_tokens(r.chunk.tokens),
                        pack_tokens(r.chunk.prefix),
                        r.created_at,
                        r.chunk.content,
                    )
                    for r in records
                ],
            )
            connection.executemany(
                "INSERT INTO context_caches (id, tenant, model, name, metadata, created_at, expires_at, chunk_key)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (r.id, r.tenant, r.model, r.name, _json(r.metadata), r.created_at, r.expires_at, r.chunk_key)
                    for r in records
                ],
            )

    def get(self, cache_id: str, tenant: str, now: float) -> ContextCache | None:
        return self.get_many([cache_id], tenant, now).get(cache_id)

    def get_many(self, cache_ids: Sequence[str], tenant: str, now: float) -> dict[str, ContextCache]:
        """Those of the ids that exist, by id."""
        wanted = list(dict.fromkeys(cache_ids))
        found = {}
        for start in range(0, len(wanted), _IDS_PER_QUERY):
            batch = wanted[start : start + _IDS_PER_QUERY]
            ids = {f"id{index}": cache_id for index, cache_id in enumerate(batch)}
            places = ", ".join(f":{name}" for name in ids)
            rows = self._database.query(
                # "+" keeps SQLite from walking all of the tenant's rows by their index
                f"{_SELECT} WHERE c.id IN ({places}) AND +c.tenant = :tenant AND {_LIVE}",
                {**ids, "tenant": tenant, "now": now},
            )
            found.update({row[0]: _context_cache(row) for row in rows})
        return found

    def list(
        self,
        tenant: str,
        now: float,
        *,
        limit: int,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Page:
        """At most ``limit`` context caches by time of creation, those that follow ``after`` where it is given.

        Pages that follow one another neither repeat nor skip an item, whatever is added or removed between them.
        Raises ContextCacheNotFoundError where ``after`` does not exist.
        """
        follows, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        values = {"tenant": tenant, "now": now, "limit": limit + 1}
        condition = ""
        if after is not None:
            cursor = self._database.query(
                "SELECT c.created_at, c.number FROM context_caches c"
                f" WHERE c.id = :id AND c.tenant = :tenant AND {_LIVE}",
                {"id": after, "tenant": tenant, "now": now},
            )
            if not cursor:
                raise ContextCacheNotFoundError(after)
            values["created_at"], values["number"] = cursor[0]
            condition = f"AND (c.created_at, c.number) {follows} (:created_at, :number)"
        rows = self._database.query(
            f"{_SELECT} WHERE c.tenant = :tenant AND {_LIVE} {condition}"
            f" ORDER BY c.created_at {direction}, c.number {direction} LIMIT :limit",
            values,
        )
        return Page(tuple(_context_cache(row) for row in rows[:limit]), has_more=len(rows) > limit)

    def update(
        self,
        cache_id: str,
        tenant: str,
        now: float,
        *,
        expires_at: float | Unchanged | None = UNCHANGED,
        name: str | Unchanged | None = UNCHANGED,
        metadata: Mapping[str, str] | Unchanged = UNCHANGED,
    ) -> ContextCache:
        """Change the given fields; returns the result. Raises ContextCacheNotFoundError."""
        changes = {
            "expires_at": expires_at,
            "name": name,
            "metadata": metadata if metadata is UNCHANGED else _json(metadata),
        }
        changes = {column: value for column, value in changes.items() if value is not UNCHANGED}
        with self._database.transaction() as connection:
            row = connection.execute(
                f"{_SELECT} WHERE c.id = :id AND c.tenant = :tenant AND {_LIVE}",
                {"id": cache_id, "tenant": tenant, "now": now},
            ).fetchone()
            if row is None:
                raise ContextCacheNotFoundError(cache_id)
            for column, value in changes.items():
                connection.execute(f"UPDATE context_caches SET {column} = ? WHERE id = ?", (value, cache_id))
            return _context_cache(connection.execute(f"{_SELECT} WHERE c.id = ?", (cache_id,)).fetchone())

    def delete(self, cache_id: str, tenant: str, now: float) -> tuple[str, ...]:
        """Remove one context cache; returns the chunk keys that no context cache holds any more.

        The caller deletes their KV from the store. Raises ContextCacheNotFoundError.
        """
        with self._database.transaction() as connection:
            removed = connection.execute(
                f"DELETE FROM context_caches AS c WHERE c.id = :id AND c.tenant = :tenant AND {_LIVE}"
                " RETURNING chunk_key",
                {"id": cache_id, "tenant": tenant, "now": now},
            ).fetchall()
            if not removed:
                raise ContextCacheNotFoundError(cache_id)
            return _release(connection, {key for (key,) in removed})

    def expire(self, now: float) -> tuple[str, ...]:
        """Remove all expired context caches of all tenants; returns released chunk keys as ``delete`` does."""
        with self._database.transaction() as connection:
            removed = connection.execute(
                "DELETE FROM context_caches WHERE expires_at <= ? RETURNING chunk_key", (now,)
            ).fetchall()
            return _release(connection, {key for (key,) in removed})

    def tenants(self) -> tuple[str, ...]:
        """All tenants that have context caches, expired ones that remain included, sorted by name."""
        rows = self._database.query("SELECT DISTINCT tenant FROM context_caches ORDER BY tenant", {})
        return tuple(tenant for (tenant,) in rows)

    def chunk_keys(self) -> dict[str, str]:
        """The model fingerprint of every chunk that some context cache holds, and of its variants, by chunk key."""
        return dict(
            self._database.query("SELECT key, fingerprint FROM chunks UNION SELECT key, fingerprint FROM variants", {})
        )

    def close(self) -> None:
        """Idempotent; no other method may be called afterwards."""
        self._database.close()


def _release(connection: sqlite3.Connection, chunk_keys: Iterable[str]) -> tuple[str, ...]:
    """Remove those of the chunks that no context cache holds, with the variants of what is left of no chunk; returns
    the keys of both."""
    released = []
    for key in chunk_keys:
        removed = connection.execute(
            "DELETE FROM chunks WHERE key = :key"
            " AND NOT EXISTS (SELECT 1 FROM context_caches WHERE chunk_key = :key)"
            " RETURNING key, fingerprint, tenant, content",
            {"key": key},
        ).fetchall()
        for gone, *owner in removed:
            released.append(gone)
            released += release_variants(connection, *owner)
    return tuple(released)


def _context_cache(row: Any) -> ContextCache:
    """A row of ``_SELECT``."""
    cache_id, tenant, model, name, metadata, created_at, expires_at, chunk_key, fingerprint, tokens, prefix = row
    return ContextCache(
        id=cache_id,
        tenant=tenant,
        model=model,
        fingerprint=fingerprint,
        chunk=Chunk(tokens=unpack_tokens(tokens), prefix=unpack_tokens(prefix)),
        chunk_key=chunk_key,
        created_at=created_at,
        expires_at=expires_at,
        name=name,
        metadata=json.loads(metadata),
    )


def _json(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata))
