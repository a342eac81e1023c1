"""Reads the context caches of another catalog's file, also of another version's, and upgrades the
catalogs of earlier versions by it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlinker.base.errors import StoreError
from kvlinker.base.types.chunks import Chunk, ContextCache, Origin, packed_chunk_key, split_salt
from kvlinker.base.types.tenants import SHARED_TENANT
from kvlinker.store.catalog.blobs import (
    TOKEN_BYTES,
    TokenBlobs,
    prefix_of,
    token_ids,
    tokens_of,
)
from kvlinker.store.catalog.databases.interface import Connection
from kvlinker.store.catalog.databases.schema import SCHEMA_VERSION
from kvlinker.store.catalog.databases.sqlite import SQLiteDatabase
from kvlinker.store.catalog.databases.state_lock import DirectoryLock
from kvlinker.store.catalog.rows import blobs_of, insert_rows
from kvlinker.store.format.sealing import KEY_VARIABLE

if TYPE_CHECKING:
    from kvlinker.store.format.encryption import Cipher

logger = logging.getLogger(__name__)


class Imported(NamedTuple):
    """Counts context caches of another catalog."""

    added: int
    present: int
    """Context caches whose ids were in this catalog already, or that have expired."""

    unreadable: int
    """Context caches whose token ids or metadata are not whole."""


def import_caches(source: Path, connection: Connection, cipher: Cipher | None) -> Imported:
    """Add the context caches of a catalog's file, with their ids, owners, names and metadata, to
    the catalog of ``connection``, which has the same cipher.

    KV is found where its key is what it was, and else computed again when it is used; texts and
    vectors are indexed again. Raises StoreError where the file is no catalog, or has another key.
    """
    caches, chunks, version, encrypted = _rows(source)
    if encrypted and cipher is None:
        raise StoreError(f"The catalog {source} is encrypted. Give its key in {KEY_VARIABLE}.")
    blobs = blobs_of(cipher if encrypted else None)
    known = {row[0] for row in connection.execute("SELECT id FROM context_caches").fetchall()}
    now = time.time()
    records: list[ContextCache] = []
    present = unreadable = 0
    for cache in caches:
        expires_at = cache.get("expires_at")
        if cache["id"] in known or (expires_at is not None and expires_at <= now):
            present += 1
            continue
        try:
            chunk = chunks[cache["chunk_key"]]
            records.append(_record(cache, chunk, blobs, same=version == SCHEMA_VERSION))
        except (StoreError, ValueError, KeyError, TypeError):
            unreadable += 1
    insert_rows(connection, blobs_of(cipher), records)
    return Imported(len(records), present, unreadable)


def upgrade(path: Path, cipher: Cipher | None) -> None:
    """Bring the catalog's file of an earlier version into this one's form. The file that was there
    is kept beside it. Raises StoreError where the file is in use, or cannot be read."""
    version = _version_of(path)
    if not 0 < version < SCHEMA_VERSION:
        return
    lock = DirectoryLock(path.parent)
    with closing(lock):
        lock.take_alone()
        if _version_of(path) != version:
            return  # another process has done it meanwhile
        backup, new = (path.with_name(f"{path.name}.{end}") for end in (f"schema-{version}", "new"))
        _clear(new)
        _settle(path)
        database = SQLiteDatabase(new)
        try:
            if cipher is not None:
                from kvlinker.store.catalog.encryption import change_key

                change_key(database, None, cipher)
            with database.transaction() as connection:
                imported = import_caches(path, connection, cipher)
            database.compact()
        finally:
            database.close()
        _keep(path, backup)
        new.replace(path)
    logger.warning(
        "The catalog of an earlier kvlinker (schema %d) was upgraded: %d context caches, %d that"
        " could not be read. The file as it was is %s; remove it when all is well.",
        version,
        imported.added,
        imported.unreadable,
        backup,
    )


def _rows(
    source: Path,
) -> tuple[list[dict[str, Any]], Mapping[str, dict[str, Any]], int, bool]:
    """Read a catalog's file: its context caches, its chunks by key, its schema version, and whether
    token ids are encrypted."""
    try:
        with closing(_open_source(source)) as file:
            file.row_factory = sqlite3.Row
            (version,) = file.execute("PRAGMA user_version").fetchone()
            names = {row["name"] for row in file.execute("SELECT name FROM sqlite_master")}
            if not {"context_caches", "chunks"} <= names:
                raise StoreError(f"{source} is no catalog of kvlinker's.")
            caches = [dict(row) for row in file.execute("SELECT * FROM context_caches")]
            chunks = {row["key"]: dict(row) for row in file.execute("SELECT * FROM chunks")}
            encrypted = "encryption" in names and bool(
                file.execute("SELECT 1 FROM encryption").fetchone()
            )
    except sqlite3.Error as error:
        raise StoreError(f"The catalog {source} cannot be read: {error}.") from error
    return caches, chunks, version, encrypted


def _record(
    cache: Mapping[str, Any], chunk: Mapping[str, Any], blobs: TokenBlobs, *, same: bool
) -> ContextCache:
    """Make the record of a row of each table; columns that earlier versions did not have get their
    defaults. ``same``: chunks are named as here, and one that is named otherwise was changed.
    Raises StoreError, ValueError, KeyError or TypeError for rows that are not whole."""
    key = chunk["key"]
    packed = (
        blobs.open(chunk["tokens"], tokens_of(key)),
        blobs.open(chunk["prefix"], prefix_of(key)),
    )
    if not packed[0] or any(len(part) % TOKEN_BYTES for part in packed):
        raise ValueError("no whole token ids")
    fingerprint, tenant = chunk["fingerprint"], cache["tenant"]
    origin = Origin(chunk.get("origin", Origin.TEXT))
    named = packed_chunk_key(*packed, fingerprint=fingerprint, owner=tenant, origin=origin)
    if same and named != key:
        raise ValueError("other token ids than those that it is named by")
    ttl = cache.get("implicit_ttl")
    return ContextCache(
        id=cache["id"],
        tenant=tenant,
        model=cache["model"],
        fingerprint=fingerprint,
        chunk=Chunk(
            token_ids(packed[0]),
            token_ids(packed[1]),
            shared=tenant == SHARED_TENANT,
            salt=split_salt(fingerprint)[1],
            origin=origin,
            scored=ttl is None,
        ),
        chunk_key=named,
        created_at=cache["created_at"],
        expires_at=cache.get("expires_at"),
        name=cache.get("name"),
        metadata=json.loads(cache.get("metadata") or "{}"),
        pinned=bool(cache.get("pinned")),
        kv_bytes=int(chunk.get("nbytes") or cache.get("nbytes") or 0),
        implicit_ttl=ttl,
    )


def _open_source(path: Path) -> sqlite3.Connection:
    """Open a file of SQLite to be read; one that is not there is not made."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _version_of(path: Path) -> int:
    """Return a file's schema version; 0 where there is none, and for what SQLite does not read,
    which the caller finds out when it opens the file."""
    with suppress(sqlite3.Error), closing(_open_source(path)) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
        return int(version)
    return 0


def _settle(path: Path) -> None:
    """Move all that a file's write-ahead log has into the file."""
    try:
        with closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise StoreError(f"The catalog {path} cannot be upgraded: {error}.") from error


def _keep(path: Path, backup: Path) -> None:
    """Give a file a second name, or copy it where the file system has no such names."""
    with suppress(FileNotFoundError):
        backup.unlink()
    try:
        os.link(path, backup)
    except OSError:
        shutil.copy2(path, backup)


def _clear(new: Path) -> None:
    """Remove what an upgrade has left that was interrupted."""
    for end in ("", "-wal", "-shm"):
        new.with_name(f"{new.name}{end}").unlink(missing_ok=True)
