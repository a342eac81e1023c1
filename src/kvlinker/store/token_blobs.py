"""Token ids as SQLite keeps them: little-endian uint32, encrypted where the store is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.store.encryption import Cipher, SealedDataError
from kvlinker.store.errors import StoreError

_TYPE = "<u4"


class TokenBlobs:
    """Packs token ids of one catalog. ``place`` names the row and column that a blob is for."""

    def __init__(self, cipher: Cipher | None = None) -> None:
        self._cipher = cipher

    def pack(self, token_ids: Sequence[int], place: str) -> bytes:
        return self.seal(np.asarray(token_ids, dtype=_TYPE).tobytes(), place)

    def unpack(self, blob: bytes, place: str) -> tuple[int, ...]:
        """Raises StoreError for a blob that was changed, or moved."""
        return tuple(np.frombuffer(self._opened(blob, place), dtype=_TYPE).tolist())

    def seal(self, packed: bytes, place: str) -> bytes:
        """What ``pack`` makes of packed token ids."""
        return packed if self._cipher is None else self._cipher.seal(packed, place.encode())

    def _opened(self, blob: bytes, place: str) -> bytes:
        if self._cipher is None:
            return blob
        try:
            return self._cipher.open(blob, place.encode())
        except SealedDataError as error:
            raise StoreError(
                f"The catalog's entry {place} was changed from outside: {error}. Delete the context cache, and create "
                "it again."
            ) from error
