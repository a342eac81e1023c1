"""Context caches: users' ids for chunks, with owner, time to live and metadata."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.tenants import Scope

LONGEST_NAME = 256
"""The most characters of a context cache's name; chosen by hand."""

MOST_PAIRS = 16
"""The most pairs of metadata of a context cache, as in OpenAI's API."""

LONGEST_KEY = 64
"""The most characters of a pair's key, as in OpenAI's API."""

LONGEST_VALUE = 512
"""The most characters of a pair's value, as in OpenAI's API."""

MAX_TTL = 100 * 365 * 24 * 3600.0
"""The longest time to live in seconds: a hundred years; chosen by hand."""

END_OF_TIME = 253_402_300_799.0
"""The latest time of expiry in Unix seconds: the last second of the year 9999."""


def new_context_cache_id() -> str:
    """Make an id that cannot be guessed: "cc_" and 24 random hexadecimal characters."""
    return f"cc_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ContextCache:
    """Describes one context cache, as the catalog records it. Times are Unix seconds."""

    id: str
    tenant: str

    model: str
    """The model's served name."""

    fingerprint: str
    """The engine's fingerprint of the model."""

    chunk: Chunk

    chunk_key: str
    """The key of the chunk's KV in the store."""

    created_at: float

    expires_at: float | None = None
    """None means that it lives until it is deleted."""

    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)

    pinned: bool = False
    """True if its KV is protected from eviction."""

    kv_bytes: int = 0
    """Bytes of its KV as computed; in a tier it may take fewer."""

    implicit_ttl: float | None = None
    """Seconds that it lives from its last use, where a prompt's text was cached on the way; None if
    it was created by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def scope(self) -> Scope:
        """The scope of its users: one tenant, or all."""
        return Scope.SHARED if self.chunk.shared else Scope.PRIVATE

    @property
    def tokens(self) -> int:
        """The number of prompt tokens that it stands for."""
        return len(self.chunk)


@dataclass(frozen=True, slots=True)
class LinkedCache:
    """A context cache whose chunk stands in a prompt."""

    id: str

    tokens: int
    """The number of prompt tokens that it stands for."""

    created: bool
    """True if this prompt brought its text first."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The context cache that an answer has become; if ``id`` is None, ``reason`` says why there is
    none."""

    id: str | None
    tokens: int = 0
    reason: str | None = None


class Unchanged(Enum):
    """The type of ``UNCHANGED``, by which ``Catalog.update`` leaves a field alone (None is a
    value)."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


class Page(NamedTuple):
    """Holds one page of a listing; ``has_more`` is true if more context caches follow the last
    item."""

    items: tuple[ContextCache, ...]
    has_more: bool
