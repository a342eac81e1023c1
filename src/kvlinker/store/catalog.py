"""The catalog of context caches and their chunks' token ids, in one SQLite file; the server is its caller.

The token ids stay for as long as a context cache holds the chunk, so KV that the store evicted can be computed again.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from kvlinker.chunks import Chunk
from kvlinker.errors import ContextCacheNotFoundError
from kvlinker.store.catalog_check import count_again, is_genuine, unheld_chunks, wrong_accounts
from kvlinker.store.catalog_encryption import encrypt_catalog, prefix_of, tokens_of
from kvlinker.store.context_cache import ContextCache
from kvlinker.store.database import Database
from kvlinker.store.encryption import Cipher
from kvlinker.store.limits import (
    NO_LIMITS,
    PINNED_BYTES,
    TENANT_USAGE,
    Limits,
    TenantUsage,
    check_pins,
    check_quotas,
    pinned_bytes,
    usages_of,
)
from kvlinker.store.schema import index_metadata
from kvlinker.store.token_blobs import TokenBlobs, changed_entry
from kvlinker.store.variants import VariantIndex, note_released, release_variants
from kvlinker.tenants import SHARED_TENANT

_COLUMNS = """SELECT c.id, c.tenant, c.model, c.name, c.metadata, c.created_at, c.expires_at, c.pinned, c.chunk_key,
    k.fingerprint, k.tokens, k.prefix, k.nbytes"""
_CHUNK = "JOIN chunks k ON k.key = c.chunk_key"
# Looked up by owner and id in one index, another tenant's id takes exactly the way of an unknown one.
_BY_OWNER = "context_caches AS c INDEXED BY context_caches_by_owner"
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
    cannot do its work. What they change survives the end of the process; a power cut only after ``persist``.
    """

    def __init__(self, path: Path, cipher: Cipher | None = None) -> None:
        """Open or create the file; with a cipher, token ids are encrypted, also those that were not before.

        Raises StoreError where it is damaged, foreign, from a newer kvlinker, or encrypted with another key.
        """
        self._database = Database(path)
        self._blobs = TokenBlobs(cipher)
        try:
            encrypt_catalog(self._database, cipher, path)
        except BaseException:
            self._database.close()
            raise
        self.variants = VariantIndex(self._database, self._blobs)

    def add(self, records: Sequence[ContextCache], limits: Limits = NO_LIMITS) -> None:
        """Record context caches and the chunks they hold: all of them or, on an error, none.

        Raises QuotaExceededError and PinLimitError.
        """
        with self._database.transaction() as connection:
            _add(connection, self._blobs, records, limits)

    def check_room(self, records: Sequence[ContextCache], limits: Limits) -> None:
        """Raise what ``add`` would raise now, and record nothing."""
        with self._database.transaction() as connection:
            connection.execute("SAVEPOINT rehearsal")
            _add(connection, self._blobs, records, limits)
            connection.execute("ROLLBACK TO rehearsal")

    def get(self, cache_id: str, tenant: str, now: float) -> ContextCache | None:
        """The tenant's context cache of this id, or the shared one."""
        return self.get_many([cache_id], tenant, now).get(cache_id)

    def get_many(self, cache_ids: Sequence[str], tenant: str, now: float) -> dict[str, ContextCache]:
        """Those of the ids that exist, the tenant's own and shared ones, by id."""
        wanted = list(dict.fromkeys(cache_ids))
        found = {}
        for start in range(0, len(wanted), _IDS_PER_QUERY):
            batch = wanted[start : start + _IDS_PER_QUERY]
            ids = {f"id{index}": cache_id for index, cache_id in enumerate(batch)}
            places = ", ".join(f":{name}" for name in ids)
            rows = self._database.query(
                f"{_COLUMNS} FROM {_BY_OWNER} {_CHUNK}"
                f" WHERE c.tenant IN (:tenant, :shared) AND c.id IN ({places}) AND {_LIVE}",
                {**ids, "tenant": tenant, "shared": SHARED_TENANT, "now": now},
            )
            found.update({row[0]: _context_cache(row, self._blobs) for row in rows})
        return found

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
        """At most ``limit`` of the tenant's own context caches by time of creation, those that follow ``after`` where
        it is given, and only those with all pairs of ``metadata``.

        Pages that follow one another neither repeat nor skip an item, whatever is added or removed between them.
        Raises ContextCacheNotFoundError where ``after`` does not exist.
        """
        follows, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        source, condition, values = _matching(tenant, metadata, now)
        position = "m.created_at, m.number" if metadata else "c.created_at, c.number"
        if after is not None:
            cursor = self._database.query(
                f"SELECT c.created_at, c.number FROM {_BY_OWNER} WHERE c.tenant = :tenant AND c.id = :id AND {_LIVE}",
                {"id": after, "tenant": tenant, "now": now},
            )
            if not cursor:
                raise ContextCacheNotFoundError(after)
            values["created_at"], values["number"] = cursor[0]
            condition += f" AND ({position}) {follows} (:created_at, :number)"
        order_by = position.replace(",", f" {direction},")
        rows = self._database.query(
            f"{_COLUMNS} FROM {source} {_CHUNK} WHERE {condition} ORDER BY {order_by} {direction} LIMIT :limit",
            {**values, "limit": limit + 1},
        )
        return Page(tuple(_context_cache(row, self._blobs) for row in rows[:limit]), has_more=len(rows) > limit)

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
        """Change the given fields; returns the result. Raises ContextCacheNotFoundError and PinLimitError."""
        changes = {
            "expires_at": expires_at,
            "name": name,
            "metadata": metadata if metadata is UNCHANGED else _json(metadata),
            "pinned": pinned,
        }
        changes = {column: value for column, value in changes.items() if value is not UNCHANGED}
        with self._database.transaction() as connection:
            row = connection.execute(
                f"SELECT c.number FROM {_BY_OWNER} WHERE c.tenant = :tenant AND c.id = :id AND {_LIVE}",
                {"id": cache_id, "tenant": tenant, "now": now},
            ).fetchone()
            if row is None:
                raise ContextCacheNotFoundError(cache_id)
            was_pinned = pinned_bytes(connection) if pinned is True else {}
            for column, value in changes.items():
                connection.execute(f"UPDATE context_caches SET {column} = ? WHERE number = ?", (value, *row))
            if metadata is not UNCHANGED:
                connection.execute("DELETE FROM metadata WHERE number = ?", row)
                index_metadata(connection, row[0], metadata)
            if pinned is True:
                check_pins(connection, limits, was_pinned)
            changed = connection.execute(f"{_COLUMNS} FROM context_caches c {_CHUNK} WHERE c.number = ?", row)
            return _context_cache(changed.fetchone(), self._blobs)

    def delete(self, cache_id: str, tenant: str, now: float) -> tuple[str, ...]:
        """Remove one context cache; returns the chunk keys that no context cache holds any more.

        The caller deletes their KV from the store; until it has, ``released`` tells of them. Raises
        ContextCacheNotFoundError.
        """
        with self._database.transaction() as connection:
            removed = connection.execute(
                f"DELETE FROM {_BY_OWNER} WHERE c.tenant = :tenant AND c.id = :id AND {_LIVE} RETURNING chunk_key",
                {"id": cache_id, "tenant": tenant, "now": now},
            ).fetchall()
            if not removed:
                raise ContextCacheNotFoundError(cache_id)
            return _release(connection, {key for (key,) in removed}, now)

    def delete_matching(
        self, tenant: str, now: float, metadata: Mapping[str, str], *, limit: int
    ) -> tuple[int, tuple[str, ...]]:
        """Remove up to ``limit`` of the tenant's context caches that have all the pairs; returns how many it removed,
        and the released chunk keys as ``delete`` does."""
        source, condition, values = _matching(tenant, metadata, now)
        with self._database.transaction() as connection:
            removed = connection.execute(
                "DELETE FROM context_caches WHERE number IN"
                f" (SELECT c.number FROM {source} WHERE {condition} LIMIT :limit) RETURNING chunk_key",
                {**values, "limit": limit},
            ).fetchall()
            return len(removed), _release(connection, {key for (key,) in removed}, now)

    def expire(self, now: float) -> tuple[int, tuple[str, ...]]:
        """Remove all expired context caches of all tenants; returns how many, and released chunk keys as ``delete``
        does."""
        with self._database.transaction() as connection:
            removed = connection.execute(
                "DELETE FROM context_caches WHERE expires_at <= ? RETURNING chunk_key", (now,)
            ).fetchall()
            return len(removed), _release(connection, {key for (key,) in removed}, now)

    def released(self, after: float, until: float, *, limit: int = -1) -> dict[str, float]:
        """Chunk keys that were released in this time and are held by nothing now, and when; any ``limit`` of them."""
        rows = self._database.query(
            "SELECT key, released_at FROM released r WHERE released_at > :after AND released_at <= :until"
            " AND NOT EXISTS (SELECT 1 FROM chunks WHERE key = r.key)"
            " AND NOT EXISTS (SELECT 1 FROM variants WHERE key = r.key) LIMIT :limit",
            {"after": after, "until": until, "limit": limit},
        )
        return dict(rows)

    def forget_released(self, chunk_keys: Iterable[str], until: float) -> None:
        """``released`` need not tell of these any more, for no tier holds their KV; nor of what was released until then
        and is held again."""
        with self._database.transaction() as connection:
            connection.execute(
                "DELETE FROM released AS r WHERE released_at <= :until AND (key IN (SELECT value FROM json_each(:gone))"
                " OR EXISTS (SELECT 1 FROM chunks WHERE key = r.key)"
                " OR EXISTS (SELECT 1 FROM variants WHERE key = r.key))",
                {"until": until, "gone": json.dumps(list(chunk_keys))},
            )

    def unheld(self, chunk_keys: Iterable[str]) -> tuple[str, ...]:
        """Those of the keys that no context cache holds, directly or as a variant of its chunk."""
        query = "SELECT 1 FROM chunks WHERE key = :key UNION SELECT 1 FROM variants WHERE key = :key"
        return tuple(key for key in dict.fromkeys(chunk_keys) if not self._database.query(query, {"key": key}))

    def usage(self, tenant: str) -> TenantUsage:
        """What the tenant has, expired context caches that remain included."""
        rows = self._database.query(TENANT_USAGE, {"tenant": tenant})
        return TenantUsage(*rows[0]) if rows else TenantUsage()

    def pinned_bytes(self, tenant: str) -> int:
        """Of the tenant's KV as computed, each chunk once."""
        pinned: dict[str, int] = dict(self._database.query(PINNED_BYTES, {}))
        return pinned.get(tenant, 0)

    def pinned(self) -> frozenset[str]:
        """The chunk keys of all pinned context caches."""
        rows = self._database.query("SELECT DISTINCT chunk_key FROM context_caches WHERE pinned", {})
        return frozenset(key for (key,) in rows)

    def set_sizes(self, fingerprint: str, bytes_per_token: int) -> None:
        """Tell the size of the model's chunks that an older kvlinker recorded without it."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE chunks SET nbytes = length * ? WHERE fingerprint = ? AND nbytes = 0",
                (bytes_per_token, fingerprint),
            )

    def tenants(self) -> tuple[str, ...]:
        """All tenants that have context caches, expired ones that remain included, sorted by name."""
        rows = self._database.query("SELECT DISTINCT tenant FROM context_caches ORDER BY tenant", {})
        return tuple(tenant for (tenant,) in rows)

    def keys_of(self, tenant: str) -> frozenset[str]:
        """The keys of the tenant's chunks and their variants."""
        rows = self._database.query(
            "SELECT key FROM chunks WHERE tenant = :tenant UNION SELECT key FROM variants WHERE tenant = :tenant",
            {"tenant": tenant},
        )
        return frozenset(key for (key,) in rows)

    def chunk_keys(self) -> dict[str, str]:
        """The model fingerprint of every chunk that some context cache holds, and of its variants, by chunk key."""
        return dict(
            self._database.query("SELECT key, fingerprint FROM chunks UNION SELECT key, fingerprint FROM variants", {})
        )

    def check(self, *, repair: bool = False) -> tuple[str, ...]:
        """Where the catalog contradicts itself, a line for each fault; takes time for large catalogs.

        ``repair`` mends: context caches whose token ids are not what they were cannot be answered, and are removed;
        accounts are counted again. Each step is one transaction.
        """
        faults = list(self._database.check())
        if faults and repair:
            with self._database.transaction() as connection:
                connection.execute("REINDEX")
                connection.execute("DELETE FROM context_caches WHERE chunk_key NOT IN (SELECT key FROM chunks)")
                connection.execute("DELETE FROM metadata WHERE number NOT IN (SELECT number FROM context_caches)")
        rows = self._database.query("SELECT key, fingerprint, tenant, tokens, prefix FROM chunks", {})
        changed = [row[0] for row in rows if not is_genuine(self._blobs, *row)]
        faults += [f"the token ids of chunk {key} are not what they were" for key in changed]
        with self._database.transaction() as connection:
            unheld = unheld_chunks(connection)
            faults += [f"chunk {key} is held by no context cache" for key in unheld]
            if repair:
                connection.executemany("DELETE FROM context_caches WHERE chunk_key = ?", [(key,) for key in changed])
                _release(connection, (*changed, *unheld), time.time())
            faults += [f"the account of tenant {tenant} is wrong" for tenant in wrong_accounts(connection)]
            if repair:
                count_again(connection)
        return tuple(faults)

    def persist(self) -> None:
        """Wait until a power cut could not undo what was changed so far."""
        self._database.persist()

    def close(self) -> None:
        """Idempotent; no other method may be called afterwards."""
        self._database.close()


def _add(connection: sqlite3.Connection, blobs: TokenBlobs, records: Sequence[ContextCache], limits: Limits) -> None:
    before = usages_of(connection, (record.tenant for record in records))
    pins = any(record.pinned for record in records)
    was_pinned = pinned_bytes(connection) if pins else {}
    connection.executemany(
        "INSERT OR IGNORE INTO chunks (key, fingerprint, tenant, tokens, prefix, created_at, content, length, nbytes)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                r.chunk_key,
                r.fingerprint,
                r.tenant,
                blobs.pack(r.chunk.tokens, tokens_of(r.chunk_key)),
                blobs.pack(r.chunk.prefix, prefix_of(r.chunk_key)),
                r.created_at,
                r.chunk.content,
                r.tokens,
                r.kv_bytes,
            )
            for r in records
        ],
    )
    for r in records:
        number = connection.execute(
            "INSERT INTO context_caches"
            " (id, tenant, model, name, metadata, created_at, expires_at, pinned, chunk_key)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (r.id, r.tenant, r.model, r.name, _json(r.metadata), r.created_at, r.expires_at, r.pinned, r.chunk_key),
        ).lastrowid
        assert number is not None
        index_metadata(connection, number, r.metadata)
    check_quotas(connection, limits.quotas, before)
    if pins:
        check_pins(connection, limits, was_pinned)


def _matching(tenant: str, metadata: Mapping[str, str], now: float) -> tuple[str, str, dict[str, Any]]:
    """A tenant's live context caches with these pairs: tables, condition, and its values."""
    values: dict[str, Any] = {"tenant": tenant, "now": now}
    if not metadata:
        return "context_caches c", f"c.tenant = :tenant AND {_LIVE}", values
    conditions = ["m.tenant = :tenant AND m.key = :key0 AND m.value = :value0", _LIVE]
    for index, (key, value) in enumerate(metadata.items()):
        values |= {f"key{index}": key, f"value{index}": value}
        if index:
            conditions.append(
                f"EXISTS (SELECT 1 FROM metadata WHERE number = c.number AND key = :key{index}"
                f" AND value = :value{index})"
            )
    return "metadata m CROSS JOIN context_caches c ON c.number = m.number", " AND ".join(conditions), values


def _release(connection: sqlite3.Connection, chunk_keys: Iterable[str], now: float) -> tuple[str, ...]:
    """Remove those of the chunks that no context cache holds, with the variants of what is left of no chunk; returns
    the keys of both, and notes them as released."""
    released = []
    for key in chunk_keys:
        removed = connection.execute(
            "DELETE FROM chunks WHERE key = :key"
            " AND NOT EXISTS (SELECT 1 FROM context_caches WHERE chunk_key = :key)"
            " RETURNING key, fingerprint, content",
            {"key": key},
        ).fetchall()
        for gone, *owner in removed:
            released.append(gone)
            released += release_variants(connection, *owner)
    note_released(connection, released, now)
    return tuple(released)


def _context_cache(row: Any, blobs: TokenBlobs) -> ContextCache:
    """A row of ``_COLUMNS``."""
    cache_id, tenant, model, name, metadata, created_at, expires_at, pinned, *chunk = row
    chunk_key, fingerprint, tokens, prefix, nbytes = chunk
    if not is_genuine(blobs, chunk_key, fingerprint, tenant, tokens, prefix):
        raise changed_entry(tokens_of(chunk_key), "its token ids are not those that it is named by")
    return ContextCache(
        id=cache_id,
        tenant=tenant,
        model=model,
        fingerprint=fingerprint,
        chunk=Chunk(
            blobs.unpack(tokens, tokens_of(chunk_key)),
            blobs.unpack(prefix, prefix_of(chunk_key)),
            shared=tenant == SHARED_TENANT,
        ),
        chunk_key=chunk_key,
        created_at=created_at,
        expires_at=expires_at,
        name=name,
        metadata=json.loads(metadata),
        pinned=bool(pinned),
        kv_bytes=nbytes,
    )


def _json(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata))
