"""Token ids as SQLite keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TYPE = "<u4"


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32."""
    return np.asarray(token_ids, dtype=_TYPE).tobytes()


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, dtype=_TYPE).tolist())
