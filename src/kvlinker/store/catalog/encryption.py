"""Packs token ids and texts of the catalog, encrypted where the store is, and changes the key of a
whole catalog."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvlinker.base.errors import StoreError
from kvlinker.store.catalog.databases.interface import Connection, Database, StateLock
from kvlinker.store.catalog.databases.state_lock import PATIENCE_SECONDS, TRY_AGAIN_SECONDS
from kvlinker.store.format.encryption import KEY_VARIABLE, Cipher, SealedDataError

_PLACE = b"catalog"
_ROWS_AT_ONCE = 500
_TYPE = "<u4"
TOKEN_BYTES = 4


class TokenBlobs:
    """Packs token ids of one catalog as little-endian uint32, encrypted with its cipher, if it has
    one.

    ``place`` names the row and column that a blob is for: in another place it does not open.
    """

    def __init__(self, cipher: Cipher | None = None) -> None:
        self._cipher = cipher

    def pack(self, token_ids: Sequence[int], place: str) -> bytes:
        """Return the blob of token ids."""
        return self.seal(np.asarray(token_ids, dtype=_TYPE).tobytes(), place)

    def unpack(self, blob: bytes, place: str) -> tuple[int, ...]:
        """Return the token ids of a blob. Raises StoreError for one that was changed, or moved."""
        packed = self.open(blob, place)
        if len(packed) % TOKEN_BYTES:
            raise changed_entry(place, "it does not hold whole token ids")
        return token_ids(packed)

    def seal(self, packed: bytes, place: str) -> bytes:
        """Return the blob of bytes, such as token ids that are packed already."""
        return packed if self._cipher is None else self._cipher.seal(packed, place.encode())

    def open(self, blob: bytes, place: str) -> bytes:
        """Return the bytes of a blob. Raises StoreError as ``unpack`` does."""
        if self._cipher is None:
            return blob
        try:
            return self._cipher.open(blob, place.encode())
        except SealedDataError as error:
            raise changed_entry(place, str(error)) from error


def token_ids(packed: bytes) -> tuple[int, ...]:
    """Return token ids that are packed, and whole."""
    return tuple(np.frombuffer(packed, dtype=_TYPE).tolist())


def changed_entry(place: str, reason: str) -> StoreError:
    """Return the error for an entry that was changed or damaged."""
    return StoreError(
        f"The catalog's entry {place} was changed from outside: {reason}. Run `kvlinker caches"
        " check --repair`, which removes what holds it, and create that again."
    )


def tokens_of(chunk_key: str) -> str:
    """Name the place of a chunk's token ids."""
    return f"chunks.tokens.{chunk_key}"


def prefix_of(chunk_key: str) -> str:
    """Name the place of the token ids that stood before a chunk."""
    return f"chunks.prefix.{chunk_key}"


def variant_of(chunk_key: str) -> str:
    """Name the place of the token ids that stood before a variant."""
    return f"variants.prefix.{chunk_key}"


def body_of(response_key: str) -> str:
    """Name the place of a response's body."""
    return f"responses.body.{response_key}"


def input_of(response_key: str) -> str:
    """Name the place of a response's input."""
    return f"responses.input.{response_key}"


def item_of(item_key: str) -> str:
    """Name the place of an item of a response's output."""
    return f"response_items.content.{item_key}"


_COLUMNS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("chunks", "tokens", tokens_of),
    ("chunks", "prefix", prefix_of),
    ("variants", "prefix", variant_of),
    ("responses", "body", body_of),
    ("responses", "input", input_of),
    ("response_items", "content", item_of),
)
"""The tables and columns that are encrypted, and what names a blob's place by its row's key."""


def open_encrypted(database: Database, lock: StateLock, cipher: Cipher | None) -> None:
    """Share the catalog, and encrypt a catalog that is not encrypted yet, if there is a cipher.

    Raises StoreError if the cipher is not the catalog's.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        lock.share()
        if cipher is None or _key_check(database) is not None:
            return _check(_key_check(database), cipher, database.place)
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
        before, after = TokenBlobs(None if sealed is None else old), TokenBlobs(new)
        connection.execute("DELETE FROM encryption")
        if new is not None:
            connection.execute("INSERT INTO encryption VALUES (?)", (new.seal(b"", _PLACE),))
            # both are plain; who wants them searched has them indexed again
            connection.texts.remove_all(connection)
            connection.execute("DELETE FROM vectors")
        changed = [_reseal(connection, *column, before, after) for column in _COLUMNS]
    return any(changed)


def _key_check(database: Database) -> bytes | None:
    """Return the cipher of the catalog's key; None if it is not encrypted."""
    rows = database.query("SELECT sealed FROM encryption", {})
    return rows[0][0] if rows else None


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
