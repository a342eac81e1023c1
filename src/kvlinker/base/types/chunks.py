"""Chunks are token ids cached as one unit; here are the contexts they are computed in, the keys of
their KV, and context caches: users' ids for chunks, with owner, time to live and metadata."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.tenants import SHARED_TENANT, Scope

CHUNK_KEY = re.compile(r"[0-9a-f]{64}")
"""Matches the keys that ``chunk_key`` returns."""

LAST_PLACE = 7
"""The last place in a row of texts for which chunks have KV of their own; chosen by hand. Each
place takes as many bytes as the chunk."""

Eviction = Literal["lru", "reuse"]
"""The eviction policy: ``lru`` evicts the least recently used chunks first, ``reuse`` the least
reused ones."""

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


class GenerationContext(StrEnum):
    """The text before a chunk while its KV is computed."""

    ALONE = "alone"
    """Nothing stands before it."""

    BOS = "bos"
    """The model's BOS token stands before it, as a part of the chunk itself (EPIC's public
    code)."""

    PREFIX = "prefix"
    """The server's prefix stands before it (BOS and chat header, or a system prompt), whose own KV
    is dropped."""


def parse_context(name: str) -> GenerationContext:
    """Return the generation context of this name. Raises InvalidRequestError for others."""
    try:
        return GenerationContext(name)
    except ValueError as error:
        known = ", ".join(GenerationContext)
        raise InvalidRequestError(
            f"Unknown context {name!r}; known are {known}.", param="context"
        ) from error


class Origin(StrEnum):
    """The origin of a chunk's KV."""

    TEXT = "text"
    """A text was computed after ``Chunk.prefix``."""

    ANSWER = "answer"
    """The model generated it after ``Chunk.prefix``, which was computed as it is."""

    LINKED_ANSWER = "linked answer"
    """The model generated it after ``Chunk.prefix``, parts of which were linked chunks."""


@dataclass(frozen=True)
class Chunk:
    """Token ids that are cached as one unit. What is computed of them is computed once."""

    tokens: tuple[int, ...]
    """The ids that appear in a prompt; in context ``BOS``, the BOS token comes first."""

    prefix: tuple[int, ...] = ()
    """The ids that stood before them when their KV was computed, and do not appear with them."""

    shared: bool = False
    """True if all tenants share its KV."""

    salt: str = ""
    """The salt of the requests that alone find it by its content; empty for those without one."""

    origin: Origin = Origin.TEXT

    place: int = 0
    """Its place in a row of texts: the number of texts between ``prefix`` and the chunk when its KV
    was computed (``engines.contract.places``). ``LAST_PLACE`` stands for all later places
    too."""

    scored: bool = field(default=True, compare=False)
    """False if attention scores are collected with its KV only where the policy that links it needs
    them: a text that a prompt brought is computed while its answer waits."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def contextual(self) -> bool:
        """True if its KV depends on a conversation before it."""
        return self.origin is not Origin.TEXT

    @cached_property
    def content(self) -> str:
        """The SHA-256 (hex) of the token ids alone, which is the same for all variants of a
        chunk."""
        return hashlib.sha256(np.asarray(self.tokens, dtype="<u4").tobytes()).hexdigest()

    @cached_property
    def keys(self) -> dict[tuple[str, str, int], str]:
        """The known keys of its KV, by model fingerprint, owner and place: ``chunk_key`` adds
        them."""
        return {}

    def at_place(self, place: int) -> Chunk:
        """Return the same chunk at another place."""
        if place == self.place:
            return self
        placed = replace(self, place=place)
        placed.__dict__["keys"] = self.keys  # as cached_property stores it
        return placed


def content_of(tokens: bytes) -> str:
    """Compute the SHA-256 (hex) of token ids as little-endian uint32."""
    return hashlib.sha256(tokens).hexdigest()


def chunk_key(chunk: Chunk, *, fingerprint: str, tenant: str) -> str:
    """Compute the key of a chunk's KV: SHA-256 (hex) over model fingerprint, tenant, prefix and
    token ids, its salt, and whether its prefix was linked; at a place above 0 the hash of that key
    and the place.

    A shared chunk's tenant is always SHARED_TENANT.
    """
    owner = SHARED_TENANT if chunk.shared else tenant
    known = chunk.keys.get((fingerprint, owner, chunk.place))
    if known is not None:
        return known
    key = chunk.keys.get((fingerprint, owner, 0))
    if key is None:
        key = packed_chunk_key(
            np.asarray(chunk.tokens, dtype="<u4").tobytes(),
            np.asarray(chunk.prefix, dtype="<u4").tobytes(),
            fingerprint=salted(fingerprint, chunk.salt),
            owner=owner,
            origin=chunk.origin,
        )
        chunk.keys[fingerprint, owner, 0] = key
    if not chunk.place:
        return key
    for place, placed in enumerate(place_keys(key), 1):
        chunk.keys[fingerprint, owner, place] = placed
    return chunk.keys[fingerprint, owner, chunk.place]


_PLACED = "kvlinker-place-2"
"""The beginning of the text whose hash is a key at a place. Rows of another form need another
number."""


def place_keys(key: str) -> tuple[str, ...]:
    """Return the keys of a chunk's KV at the places 1 to ``LAST_PLACE``, given its ``chunk_key`` at
    place 0."""
    keys = []
    for place in range(1, LAST_PLACE + 1):
        keys.append(hashlib.sha256(f"{_PLACED} {key} {place}".encode()).hexdigest())
    return tuple(keys)


def with_places(keys: Iterable[str]) -> frozenset[str]:
    """Return these keys of chunks at place 0, and those of the same chunks at all other places."""
    return frozenset(each for key in keys for each in (key, *place_keys(key)))


_SALT = " salt "
"""The separator between a model's fingerprint and a salt."""


def salted(fingerprint: str, salt: str) -> str:
    """Return a model's fingerprint as chunks with this salt have it: those with another are as far
    away as those of another model."""
    return f"{fingerprint}{_SALT}{salt}" if salt else fingerprint


def split_salt(fingerprint: str) -> tuple[str, str]:
    """Return the model's own fingerprint and the salt, empty for none, of what ``salted``
    returned."""
    own, _, salt = fingerprint.partition(_SALT)
    return own, salt


def salt_of(text: str | None) -> str:
    """Return the salt of a request that sends this text along; empty for none."""
    return "" if not text else hashlib.sha256(text.encode()).hexdigest()[:32]


def packed_chunk_key(
    tokens: bytes, prefix: bytes, *, fingerprint: str, owner: str, origin: Origin = Origin.TEXT
) -> str:
    """Compute the ``chunk_key`` of token ids as little-endian uint32.

    Every part is length-prefixed, so that no two different inputs share their bytes. An answer
    after KV that was computed in full has the key of a text there, and the same KV up to rounding.
    """
    digest = hashlib.sha256(b"kvlinker-chunk-1")
    parts = [fingerprint.encode(), owner.encode(), prefix, tokens]
    if origin is Origin.LINKED_ANSWER:
        parts.append(origin.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


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
