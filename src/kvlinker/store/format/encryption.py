"""Encrypts at rest (AES-256-GCM): small records as a whole, chunks in blocks that can be read in
any order.

A sealed chunk is a header (magic, salt, length of the plain bytes) and blocks of equal length, of
which the last may be shorter, each with its tag. Every chunk has a key of its own, derived from the
salt; a block's nonce is its number. Blocks are bound to the chunk key, the length and their place,
so that neither files nor parts of them can be exchanged unnoticed.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvlinker.base.errors import StoreError
from kvlinker.base.installing import install_command
from kvlinker.store.format.byte_source import Bytes, ByteSource
from kvlinker.store.format.sealing import SealedDataError, Sealing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

BLOCK_BYTES = 1 << 18
"""The plain bytes of one block; chosen by hand. Part of the format of sealed chunks, as the lengths
below: those of AES-256-GCM."""

_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SALT_BYTES = 32
_LENGTH_BYTES = 8
_MAGIC = b"kvlseal1"
_HEADER_BYTES = len(_MAGIC) + _SALT_BYTES + _LENGTH_BYTES


class Cipher:
    """Encrypts with one key. Methods may be called from any thread."""

    def __init__(self, key: bytes) -> None:
        """Take a key of 32 bytes. Raises StoreError if the library is missing."""
        try:
            import cryptography  # noqa: F401
        except ModuleNotFoundError as error:
            raise StoreError(
                f"Encryption needs a library that is not installed: {install_command('encryption')}"
            ) from error
        self._key = key
        self._records = self._derive(b"", b"records")

    def seal(self, data: bytes, associated: bytes) -> bytes:
        """Encrypt the data, with a random nonce before it; it opens only with the same
        ``associated`` bytes."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._records.encrypt(nonce, data, associated)

    def open(self, sealed: bytes, associated: bytes) -> bytes:
        """Decrypt what ``seal`` returned. Raises SealedDataError."""
        return _decrypt(self._records, sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], associated)

    def sealing(self) -> Sealing:
        """Return the sealing of chunks with this key."""
        return EncryptedSealing(self)

    def of_chunk(self, salt: bytes) -> AESGCM:
        """Return the AES-GCM cipher of one chunk, whose key is derived from ``salt``."""
        return self._derive(salt, b"chunk")

    def _derive(self, salt: bytes, purpose: bytes) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derivation = HKDF(SHA256(), _KEY_BYTES, salt, b"kvlinker " + purpose)
        return AESGCM(derivation.derive(self._key))


def parse_key(text: str, variable: str) -> bytes:
    """Return the 32 bytes of a key in hex or base64. Raises StoreError for other texts."""
    try:
        if re.fullmatch(r"[0-9a-fA-F]{64}", text):
            return bytes.fromhex(text)
        key = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != _KEY_BYTES:
        raise StoreError(
            f"{variable} is no key: it takes 32 random bytes in base64 or in hex, and got"
            f" {len(text)} characters that are neither. Make one with  openssl rand -base64 32"
        )
    return key


class EncryptedSealing(Sealing):
    """Encrypts the bytes of chunks on their way out of a tier and decrypts them on their way in."""

    encrypts = True

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def nbytes(self, plain: int) -> int:
        return _HEADER_BYTES + plain + _TAG_BYTES * -(-plain // BLOCK_BYTES)

    def pieces(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        salt = os.urandom(_SALT_BYTES)
        cipher = self._cipher.of_chunk(salt)
        yield memoryview(_MAGIC + salt + nbytes.to_bytes(_LENGTH_BYTES, "little"))
        for number, block in enumerate(_blocks(pieces)):
            yield memoryview(cipher.encrypt(_nonce(number), block, _associated(key, nbytes)))

    def source(self, key: str, source: ByteSource) -> ByteSource:
        return _OpenedSource(self._cipher, key, source)


class _OpenedSource:
    """Decrypts the blocks that are read; the last one is remembered, for the next read often begins
    within it."""

    def __init__(self, cipher: Cipher, key: str, source: ByteSource) -> None:
        if source.size < _HEADER_BYTES:
            raise SealedDataError("truncated, or not encrypted")
        header = source.read(0, _HEADER_BYTES).tobytes()
        if not header.startswith(_MAGIC):
            raise SealedDataError("it is not encrypted")
        self.size = int.from_bytes(header[-_LENGTH_BYTES:], "little")
        expected = cipher.sealing().nbytes(self.size)
        if source.size != expected:
            raise SealedDataError(f"it has {source.size} bytes instead of {expected}")
        self._source = source
        self._associated = _associated(key, self.size)
        self._cipher = cipher.of_chunk(header[len(_MAGIC) : -_LENGTH_BYTES])
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, offset: int, length: int) -> Bytes:
        if offset + length > self.size:
            raise EOFError
        plain: Bytes = np.empty(length, dtype=np.uint8)
        position = offset
        while position < offset + length:
            number, start = divmod(position, BLOCK_BYTES)
            part = self._block(number)[start : start + offset + length - position]
            plain[position - offset : position - offset + len(part)] = np.frombuffer(
                part, dtype=np.uint8
            )
            position += len(part)
        return plain

    def _block(self, number: int) -> memoryview:
        known, block = self._last
        if known != number:
            begin = number * BLOCK_BYTES
            length = min(BLOCK_BYTES, self.size - begin) + _TAG_BYTES
            sealed = self._source.read(_HEADER_BYTES + begin + number * _TAG_BYTES, length)
            block = _decrypt(self._cipher, _nonce(number), sealed.data, self._associated)
            self._last = (number, block)
        return memoryview(block)


def _blocks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of the pieces in blocks of equal length; the last one may be shorter. A block
    within one piece is a view of it."""
    rest = bytearray()
    for piece in pieces:
        left = piece.cast("B")
        if rest:
            taken = BLOCK_BYTES - len(rest)
            rest += left[:taken]
            left = left[taken:]
            if len(rest) < BLOCK_BYTES:
                continue
            yield memoryview(bytes(rest))
            rest.clear()
        while len(left) >= BLOCK_BYTES:
            yield left[:BLOCK_BYTES]
            left = left[BLOCK_BYTES:]
        rest += left
    if rest:
        yield memoryview(bytes(rest))


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")


def _associated(key: str, nbytes: int) -> bytes:
    return b"kvlinker-chunk " + key.encode() + nbytes.to_bytes(_LENGTH_BYTES, "little")


def _decrypt(cipher: AESGCM, nonce: bytes, sealed: bytes | memoryview, associated: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(nonce, sealed, associated)
    except (InvalidTag, ValueError) as error:
        raise SealedDataError(
            "it does not open with the encryption key: another key, or changed bytes"
        ) from error
