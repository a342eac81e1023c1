"""Encrypts the blobs of the catalog, and changes the key of a whole catalog."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvlinker.base.errors import StoreError
from kvlinker.store.catalog.blobs import (
    TokenBlobs,
    body_of,
    changed_entry,
    input_of,
    item_of,
    prefix_of,
    tokens_of,
    variant_of,
)
from kvlinker.store.catalog.databases.interface import Connection, Database, StateLock
from kvlinker.store.catalog.databases.state_lock import PATIENCE_SECONDS, TRY_AGAIN_SECONDS
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.format.sealing import KEY_VARIABLE, SealedDataError

_PLACE = b"catalog"

_ROWS_AT_ONCE = 500
"""The rows that are encrypted anew with one query; chosen by hand."""


class EncryptedBlobs(TokenBlobs):
    """Encrypts the blobs of one catalog with its cipher."""

    encrypts = True

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def seal(self, packed: bytes, place: str) -> bytes:
        return self._cipher.seal(packed, place.encode())

    def open(self, blob: bytes, place: str) -> bytes:
        try:
            return self._cipher.open(blob, place.encode())
        except SealedDataError as error:
            raise changed_entry(place, str(error)) from error


_COLUMNS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("chunks", "tokens", tokens_of),
    ("chunks", "prefix", prefix_of),
    ("variants", "prefix", variant_of),
    ("responses", "body", body_of),
    ("responses", "input", input_of),
    ("response_items", "content", item_of),
)
"""The tables and columns that are encrypted, and what names a blob's place by its row's key."""


def open_encrypted(database: Database, lock: StateLock, cipher: Cipher) -> None:
    """Share the catalog, and encrypt a catalog that is not encrypted yet.

    Raises StoreError if the cipher is not the catalog's.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        lock.share()
        rows = database.query("SELECT sealed FROM encryption", {})
        if rows:
            return _check(rows[0][0], cipher, database.place)
        try:
            lock.take_alone()  # others would go on without the key
        except StoreError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(TRY_AGAIN_SECONDS)  # its owner may just be encrypting the catalog
            continue
        if change_key(database, None, cipher):
            database.compact()
        return lock.share()


def change_key(database: Database, old: Cipher | None, new: Cipher | None) -> bool:
    """Encrypt the catalog with ``new``, or decrypt it if that is None, in one transaction. Returns
    whether any entry had to be changed. A catalog that was not encrypted does not need ``old``.

    Raises StoreError if it is encrypted with neither, or an entry does not open.
    """
    with database.transaction() as connection:
        row = connection.execute("SELECT sealed FROM encryption").fetchone()
        sealed = None if row is None else row[0]
        if _is_of(sealed, new):
            return False
        if sealed is not None:
            _check(sealed, old, database.place)
        before = TokenBlobs() if sealed is None or old is None else EncryptedBlobs(old)
        after = TokenBlobs() if new is None else EncryptedBlobs(new)
        connection.execute("DELETE FROM encryption")
        if new is not None:
            connection.execute("INSERT INTO encryption VALUES (?)", (new.seal(b"", _PLACE),))
            # texts and vectors would stay plain: the server indexes them again if search is on
            connection.texts.remove_all(connection)
            connection.execute("DELETE FROM vectors")
        changed = [_reseal(connection, *column, before, after) for column in _COLUMNS]
    return any(changed)


def _is_of(sealed: bytes | None, cipher: Cipher | None) -> bool:
    """Return whether a catalog with this check is encrypted with the cipher, or not at all without
    one."""
    if sealed is None or cipher is None:
        return sealed is None and cipher is None
    try:
        cipher.open(sealed, _PLACE)
    except SealedDataError:
        return False
    return True


def _check(sealed: bytes | None, cipher: Cipher | None, place: str) -> None:
    """Raise StoreError unless a catalog with this check is encrypted with the cipher, or not at all
    without one."""
    if _is_of(sealed, cipher):
        return
    if cipher is None:
        raise StoreError(f"The catalog {place} is encrypted. Give its key in {KEY_VARIABLE}.")
    raise StoreError(
        f"{KEY_VARIABLE} is not the key that the catalog {place} is encrypted with. Give that one,"
        " or choose another state directory."
    )


def _reseal(
    connection: Connection,
    table: str,
    column: str,
    place: Callable[[str], str],
    before: TokenBlobs,
    after: TokenBlobs,
) -> bool:
    """Encrypt all blobs of a column anew; returns whether there were any."""
    select = f"SELECT key, {column} FROM {table} WHERE key > ? ORDER BY key LIMIT {_ROWS_AT_ONCE}"
    update = f"UPDATE {table} SET {column} = ? WHERE key = ?"
    last = ""
    while rows := connection.execute(select, (last,)).fetchall():
        last = rows[-1][0]
        resealed = [
            (after.seal(before.open(blob, place(key)), place(key)), key) for key, blob in rows
        ]
        connection.executemany(update, resealed)
    return bool(last)
