"""Which of the catalog's columns are encrypted, and how a catalog comes to be."""

from __future__ import annotations

from pathlib import Path

from kvlinker.store.database import Database
from kvlinker.store.encryption import KEY_VARIABLE, Cipher, SealedDataError
from kvlinker.store.errors import StoreError
from kvlinker.store.token_blobs import TokenBlobs

_PLACE = b"catalog"


def tokens_of(chunk_key: str) -> str:
    """The place of a chunk's token ids."""
    return f"chunks.tokens.{chunk_key}"


def prefix_of(chunk_key: str) -> str:
    """The place of the token ids that stood before a chunk."""
    return f"chunks.prefix.{chunk_key}"


def variant_of(chunk_key: str) -> str:
    """The place of the token ids that stood before a variant."""
    return f"variants.prefix.{chunk_key}"


def encrypt_catalog(database: Database, cipher: Cipher | None, path: Path) -> None:
    """Encrypt what is not encrypted yet, if there is a cipher. Raises StoreError where it is not the catalog's."""
    rows = database.query("SELECT sealed FROM encryption", {})
    if rows:
        _check(rows[0][0], cipher, path)
    elif cipher is not None and _encrypt(database, cipher, path):
        database.compact()


def _check(sealed: bytes, cipher: Cipher | None, path: Path) -> None:
    if cipher is None:
        raise StoreError(f"The catalog {path} is encrypted. Give its key in {KEY_VARIABLE}.")
    try:
        cipher.open(sealed, _PLACE)
    except SealedDataError as error:
        raise StoreError(
            f"{KEY_VARIABLE} is not the key that the catalog {path} is encrypted with. Give that one, or choose "
            "another state directory."
        ) from error


def _encrypt(database: Database, cipher: Cipher, path: Path) -> bool:
    """Whether anything was there to encrypt."""
    blobs = TokenBlobs(cipher)
    with database.transaction() as connection:
        known = connection.execute("SELECT sealed FROM encryption").fetchone()
        if known is not None:  # another process was quicker
            _check(known[0], cipher, path)
            return False
        connection.execute("INSERT INTO encryption VALUES (?)", (cipher.seal(b"", _PLACE),))
        chunks = connection.execute("SELECT key, tokens, prefix FROM chunks").fetchall()
        connection.executemany(
            "UPDATE chunks SET tokens = ?, prefix = ? WHERE key = ?",
            [
                (blobs.seal(tokens, tokens_of(key)), blobs.seal(prefix, prefix_of(key)), key)
                for key, tokens, prefix in chunks
            ],
        )
        variants = connection.execute("SELECT key, prefix FROM variants").fetchall()
        connection.executemany(
            "UPDATE variants SET prefix = ? WHERE key = ?",
            [(blobs.seal(prefix, variant_of(key)), key) for key, prefix in variants],
        )
    return bool(chunks)
