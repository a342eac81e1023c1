"""Packs token ids and texts as the catalog's blobs. ``encryption.py`` is imported only where a key
is set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlinker.base.errors import StoreError

TOKEN_TYPE = "<u4"
"""The type of packed token ids, as NumPy names it."""

TOKEN_BYTES = 4
"""The bytes of one packed token id."""


class TokenBlobs:
    """Packs token ids of one catalog as little-endian uint32, and leaves blobs as they are.

    ``place`` names the row and column that a blob is for: encrypted, it does not open elsewhere.
    """

    encrypts = False

    def pack(self, token_ids: Sequence[int], place: str) -> bytes:
        """Return the blob of token ids."""
        return self.seal(np.asarray(token_ids, dtype=TOKEN_TYPE).tobytes(), place)

    def unpack(self, blob: bytes, place: str) -> tuple[int, ...]:
        """Return the token ids of a blob. Raises StoreError for one that was changed, or moved."""
        packed = self.open(blob, place)
        if len(packed) % TOKEN_BYTES:
            raise changed_entry(place, "it does not hold whole token ids")
        return token_ids(packed)

    def seal(self, packed: bytes, place: str) -> bytes:
        """Return the blob of bytes, such as token ids that are packed already."""
        return packed

    def open(self, blob: bytes, place: str) -> bytes:
        """Return the bytes of a blob. Raises StoreError as ``unpack`` does."""
        return blob


def token_ids(packed: bytes) -> tuple[int, ...]:
    """Return token ids that are packed, and whole."""
    return tuple(np.frombuffer(packed, dtype=TOKEN_TYPE).tolist())


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
