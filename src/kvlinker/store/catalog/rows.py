"""Writes context caches as the catalog's rows, looks them up, and reads them back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlinker.base.errors import StoreError
from kvlinker.base.types.chunks import (
    END_OF_TIME,
    Chunk,
    ContextCache,
    Origin,
    packed_chunk_key,
    split_salt,
)
from kvlinker.base.types.tenants import SHARED_TENANT
from kvlinker.store.catalog.blobs import (
    TOKEN_BYTES,
    TOKEN_TYPE,
    TokenBlobs,
    changed_entry,
    prefix_of,
    token_ids,
    tokens_of,
)
from kvlinker.store.catalog.databases.interface import Connection

if TYPE_CHECKING:
    from kvlinker.store.format.encryption import Cipher

COLUMNS = """c.id, c.model, c.name, c.metadata, c.created_at, c.expires_at, c.pinned,
    c.implicit_ttl, k.nbytes, c.chunk_key, k.fingerprint, c.tenant, k.tokens, k.prefix, k.origin"""
"""Names the columns that ``read_row`` takes, of context caches ``c`` that are joined with
``CHUNK``; the last ones are those of ``CHUNK_COLUMNS``."""

CHUNK = "JOIN chunks k ON k.key = c.chunk_key"

CHUNK_COLUMNS = "k.key, k.fingerprint, k.tenant, k.tokens, k.prefix, k.origin"
"""Names the columns that ``read_chunk`` takes, of chunks ``k``."""

BY_OWNER = "context_caches AS c INDEXED BY context_caches_by_owner"
"""Selects context caches ``c`` by owner and id in one index: another tenant's id takes exactly the
way of an unknown one."""

LIVE = "(c.expires_at IS NULL OR c.expires_at > :now)"

SEARCHED = f"c.implicit_ttl IS NULL AND {LIVE}"
"""Selects context caches that searches find: implicit ones, which were not made to be searched, are
left out."""


@dataclass(frozen=True, slots=True)
class Matching:
    """Describes in SQL which context caches ``c`` to select. Another condition may follow
    ``condition``, whose values are ``values``."""

    tables: str
    condition: str
    values: Mapping[str, Any]
    position: str
    """The columns that order them by time of creation."""


def matching(tenant: str, metadata: Mapping[str, str], now: float) -> Matching:
    """Describe a tenant's live context caches that have all these pairs."""
    conditions, pairs = with_pairs(metadata)
    values = {"tenant": tenant, "now": now, **pairs}
    if not metadata:
        return Matching(
            "context_caches c", f"c.tenant = :tenant AND {LIVE}", values, "c.created_at, c.number"
        )
    first = "m.tenant = :tenant AND m.key = :key0 AND m.value = :value0"
    tables = "metadata m CROSS JOIN context_caches c ON c.number = m.number"
    return Matching(
        tables, " AND ".join([first, LIVE, *conditions[1:]]), values, "m.created_at, m.number"
    )


def with_pairs(metadata: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return a condition for each pair, by which a context cache ``c`` has it, and the values of
    all conditions."""
    conditions: list[str] = []
    values: dict[str, str] = {}
    for index, (key, value) in enumerate(metadata.items()):
        conditions.append(
            f"EXISTS (SELECT 1 FROM metadata WHERE number = c.number AND key = :key{index} AND"
            f" value = :value{index})"
        )
        values |= {f"key{index}": key, f"value{index}": value}
    return conditions, values


def blobs_of(cipher: Cipher | None) -> TokenBlobs:
    """Return the packing of a catalog that is encrypted with the cipher, or not at all without
    one."""
    if cipher is None:
        return TokenBlobs()
    from kvlinker.store.catalog.encryption import EncryptedBlobs

    return EncryptedBlobs(cipher)


def insert_rows(connection: Connection, blobs: TokenBlobs, records: Sequence[ContextCache]) -> None:
    """Record context caches, findable by their metadata, and the chunks that they hold."""
    connection.executemany(
        "INSERT INTO chunks (key, fingerprint, tenant, tokens, prefix, created_at,"
        " content, length, nbytes, origin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
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
                r.chunk.origin.value,
            )
            for r in records
        ],
    )
    connection.executemany(
        "INSERT INTO context_caches (id, tenant, model, name, metadata, created_at, expires_at,"
        " pinned, chunk_key, implicit_ttl) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                r.id,
                r.tenant,
                r.model,
                r.name,
                pack_metadata(r.metadata),
                r.created_at,
                r.expires_at,
                r.pinned,
                r.chunk_key,
                r.implicit_ttl,
            )
            for r in records
        ],
    )
    index_metadata(connection, {r.id: r.metadata for r in records})


def index_metadata(connection: Connection, added: Mapping[str, Mapping[str, str]]) -> None:
    """Make context caches, which have no entries in ``metadata``, findable by their pairs, which
    are given by id."""
    connection.executemany(
        "INSERT INTO metadata SELECT tenant, ?, ?, created_at, number FROM context_caches WHERE"
        " id = ?",
        [(key, value, each) for each, pairs in added.items() for key, value in pairs.items()],
    )


def read_row(row: Any, blobs: TokenBlobs) -> ContextCache:
    """Return the context cache of a row of ``COLUMNS``. Raises StoreError if its token ids were
    changed from outside."""
    cache = read_genuine(row, blobs)
    if cache is None:
        raise changed_entry(tokens_of(row[9]), "its token ids are not those that it is named by")
    return cache


def read_genuine(row: Any, blobs: TokenBlobs) -> ContextCache | None:
    """Return the context cache of a row of ``COLUMNS``; None if its token ids were changed from
    outside."""
    cache_id, model, name, metadata, created_at, expires_at, pinned, ttl, nbytes, *own = row
    chunk = read_chunk(own, blobs, scored=ttl is None)
    if chunk is None:
        return None
    chunk_key, fingerprint, tenant, *_ = own
    return ContextCache(
        id=cache_id,
        tenant=tenant,
        model=model,
        fingerprint=fingerprint,
        chunk=chunk,
        chunk_key=chunk_key,
        created_at=created_at,
        # an earlier kvlinker took times that no calendar has
        expires_at=None if expires_at is None else min(expires_at, END_OF_TIME),
        name=name,
        metadata=json.loads(metadata),
        pinned=bool(pinned),
        kv_bytes=nbytes,
        implicit_ttl=ttl,
    )


def read_tokens(rows: Iterable[Any], blobs: TokenBlobs) -> dict[str, tuple[int, ...]]:
    """Return the token ids of chunks by chunk key, in the order of their rows of ``CHUNK_COLUMNS``,
    without those that were changed from outside."""
    packed = ((row[0], genuine_tokens(row, blobs)) for row in rows)
    return {key: token_ids(own[0]) for key, own in packed if own is not None}


def read_chunk(row: Any, blobs: TokenBlobs, *, scored: bool = True) -> Chunk | None:
    """Return the chunk of a row of ``CHUNK_COLUMNS``; None if its token ids were changed from
    outside."""
    packed = genuine_tokens(row, blobs)
    if packed is None:
        return None
    key, fingerprint, tenant, _, _, origin = row
    own_fingerprint, salt = split_salt(fingerprint)
    chunk = Chunk(
        tuple(np.frombuffer(packed[0], dtype=TOKEN_TYPE).tolist()),
        tuple(np.frombuffer(packed[1], dtype=TOKEN_TYPE).tolist()),
        shared=tenant == SHARED_TENANT,
        salt=salt,
        origin=Origin(origin),
        scored=scored,
    )
    chunk.keys[own_fingerprint, tenant, 0] = key
    return chunk


def genuine_tokens(row: Any, blobs: TokenBlobs) -> tuple[bytes, bytes] | None:
    """Return the packed token ids of a row of ``CHUNK_COLUMNS``, and those before the chunk; None
    if they are not whole, or not those that its key names: SQLite has no checksums."""
    key, fingerprint, tenant, tokens, prefix, origin = row
    try:
        if blobs.encrypts:
            tokens = blobs.open(tokens, tokens_of(key))
            prefix = blobs.open(prefix, prefix_of(key))
        known = packed_chunk_key(
            tokens, prefix, fingerprint=fingerprint, owner=tenant, origin=Origin(origin)
        )
    except (StoreError, ValueError):
        return None
    whole = len(tokens) % TOKEN_BYTES == 0 and len(prefix) % TOKEN_BYTES == 0
    return (tokens, prefix) if whole and known == key else None


def pack_metadata(metadata: Mapping[str, str]) -> str:
    """Return the value of the column ``metadata``."""
    return json.dumps(dict(metadata))
