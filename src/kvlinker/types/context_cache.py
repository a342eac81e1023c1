"""What a user holds: an id for a chunk cache, with owner, time to live and metadata."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from kvlinker.types.chunks import Chunk
from kvlinker.types.tenants import Scope


def new_context_cache_id() -> str:
    """An id that cannot be guessed: "cc_" and 24 random hexadecimal characters."""
    return f"cc_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ContextCache:
    """One context cache, as the catalog records it.

    ``model`` is the served name, ``fingerprint`` the engine's; ``chunk_key`` names the chunk's KV in the store.
    Times are Unix seconds; ``expires_at`` None means that it lives until it is deleted. ``pinned``: its KV is not
    evicted. ``kv_bytes``: of its KV as computed, which may lie in a tier in fewer.
    """

    id: str
    tenant: str
    model: str
    fingerprint: str
    chunk: Chunk
    chunk_key: str
    created_at: float
    expires_at: float | None = None
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    pinned: bool = False
    kv_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def scope(self) -> Scope:
        return Scope.SHARED if self.chunk.shared else Scope.PRIVATE

    @property
    def tokens(self) -> int:
        """How many prompt tokens it stands for."""
        return len(self.chunk)


class Unchanged(Enum):
    """The type of ``UNCHANGED``, which tells ``Catalog.update`` to leave a field alone (None is a value)."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


class Page(NamedTuple):
    """One page of a listing; ``has_more``: further context caches follow the last item."""

    items: tuple[ContextCache, ...]
    has_more: bool
