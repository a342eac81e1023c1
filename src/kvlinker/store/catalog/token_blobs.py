"""Token ids as SQLite keeps them: little-endian uint32, encrypted where the store is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.errors import StoreError
from kvlinker.store.format.encryption import Cipher, SealedDataError

_TYPE = "<u4"
_TOKEN_BYTES = 4


class TokenBlobs:
    """Packs token ids of one catalog. ``place`` names the row and column that a blob is for."""

    def __init__(self, cipher: Cipher | None = None) -> None:
        self._cipher = cipher

    def pack(self, token_ids: Sequence[int], place: str) -> bytes:
        return self.seal(np.asarray(token_ids, dtype=_TYPE).tobytes(), place)

    def unpack(self, blob: bytes, place: str) -> tuple[int, ...]:
        """Raises StoreError for a blob that was changed, or moved."""
        packed = self.open(blob, place)
        if len(packed) % _TOKEN_BYTES:
            raise changed_entry(place, "it does not hold whole token ids")
        return tuple(np.frombuffer(packed, dtype=_TYPE).tolist())

    def seal(self, packed: bytes, place: str) -> bytes:
        """What ``pack`` makes of packed token ids."""
        return packed if self._cipher is None else self._cipher.seal(packed, place.encode())

    def open(self, blob: bytes, place: str) -> bytes:
        """The packed token ids of what ``seal`` made. Raises StoreError as ``unpack``."""
        if self._cipher is None:
            return blob
        try:
            return self._cipher.open(blob, place.encode())
        except SealedDataError as error:
            raise changed_entry(place, str(error)) from error


def changed_entry(place: str, reason: str) -> StoreError:
    """The error of an entry that is not what was written there."""
    return StoreError(
        f"The catalog's entry {place} was changed from outside: {reason}. Run `kvlinker caches check --repair`, which "
        "removes its context caches, and create them again."
    )
