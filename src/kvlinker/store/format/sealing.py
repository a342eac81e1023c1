"""The interface by which chunks are encrypted on their way out of a tier, and its default, which
leaves them as they are. ``encryption.py`` is imported only where a key is set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pydantic import SecretStr

from kvlinker.store.format.byte_source import ByteSource

if TYPE_CHECKING:
    from kvlinker.store.format.encryption import Cipher

KEY_VARIABLE = "KVLINKER_ENCRYPTION_KEY"
"""The variable of the setting ``encryption_key``."""

NEW_KEY_VARIABLE = "KVLINKER_NEW_ENCRYPTION_KEY"
"""The variable of the key that ``kvlinker caches rekey`` changes to."""


class SealedDataError(Exception):
    """Raised when bytes were not sealed with this key for this place, or were changed since; the
    message says which."""


class Sealing:
    """Leaves the bytes of chunks as they are."""

    encrypts = False

    def nbytes(self, plain: int) -> int:
        """Return the number of bytes that ``pieces`` yields for ``plain`` bytes."""
        return plain

    def pieces(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the ``nbytes`` of the chunk of this key, sealed."""
        yield from pieces

    def source(self, key: str, source: ByteSource) -> ByteSource:
        """Return the plain bytes of a sealed chunk. Raises SealedDataError, and so does reading
        from it."""
        return source


NOT_SEALED = Sealing()


def sealing_of(cipher: Cipher | None) -> Sealing:
    """Return the sealing with a cipher; without one, ``NOT_SEALED``."""
    return NOT_SEALED if cipher is None else cipher.sealing()


def load_cipher(key: SecretStr | None, variable: str = KEY_VARIABLE) -> Cipher | None:
    """Return the cipher of a key as ``variable`` gives it, 32 bytes in hex or base64; None without
    one.

    Raises StoreError for a text that is no key.
    """
    if key is None:
        return None
    from kvlinker.store.format.encryption import Cipher, parse_key

    return Cipher(parse_key(key.get_secret_value().strip(), variable))
