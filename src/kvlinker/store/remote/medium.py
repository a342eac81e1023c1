"""The interface of a medium for a remote tier's blobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

KEYS_AT_ONCE = 1000
"""The most keys that one request to a medium asks for; chosen by hand."""


class MediumUnavailable(Exception):  # noqa: N818 - a state, reported to the availability
    """Raised when the medium does not answer, or not sensibly; the message says how."""


class MediumRefused(Exception):  # noqa: N818
    """Raised when the medium refuses an operation: it is full, read-only, or does not allow it.
    Others may still succeed."""


class BlobGone(Exception):  # noqa: N818
    """Raised when a blob vanished while it was read: another process evicted or deleted it."""


class BlobDamaged(Exception):  # noqa: N818
    """Raised when the value under a key cannot be a blob that was written whole; the message says
    why."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob as it was found under its key."""

    nbytes: int
    version: bytes = b""
    """Another one for each time that the key was written, where the medium can tell."""


@dataclass(frozen=True, slots=True)
class MediumUsage:
    """The fill level of a medium by its own count: of all servers' blobs, and perhaps of other
    programs' data."""

    used_bytes: int
    blobs: int


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The outcome of a write."""

    stored: bool
    evicted: tuple[int, ...] = ()
    """The sizes in bytes of the blobs that were evicted for it."""


class BlobMedium(Protocol):
    """Keeps blobs under chunk keys, and evicts the least recently used of all servers first. A
    medium that evicts by itself, as Redis does, reports no evictions.

    Blobs appear whole or not at all. Methods may be called from any thread and may wait for a
    network; each raises MediumUnavailable and MediumRefused, and leaves the medium consistent when
    it does.
    """

    @property
    def place(self) -> str:
        """The location of the medium, without credentials, for logs."""

    @property
    def budget_bytes(self) -> int:
        """The bytes that all blobs may take together."""

    @property
    def ahead_bytes(self) -> int:
        """The bytes that one round trip reads while a blob is read layer by layer: enough to hide
        the trip's own time, and few enough for the first layers to arrive soon."""

    def open(self) -> tuple[int, ...]:
        """Reach the medium and evict down to the budget, also again after an outage; returns
        evicted sizes."""

    def stat(self, key: str) -> Blob | None:
        """Return the blob, or None if there is none. Raises BlobDamaged."""

    def touch(self, key: str) -> Blob | None:
        """Return what ``stat`` does; the blob is now the most recently used."""

    def read_into(self, key: str, blob: Blob, start: int, target: memoryview) -> None:
        """Fill ``target`` with the blob's bytes from ``start`` on. Raises BlobDamaged, and BlobGone
        also where another version took its place."""

    def write(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> WriteOutcome:
        """Keep a blob of ``nbytes``, at most the budget, evicting for it. One that is there already
        stays."""

    def delete(self, key: str) -> None:
        """Remove whatever lies under the key."""

    def keys(self) -> tuple[str, ...]:
        """Return the keys of all blobs, the least recently used first where the order is known."""

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the bytes of those of the keys that are known here, with one question; at most
        KEYS_AT_ONCE."""

    def usage(self) -> MediumUsage:
        """Return how full the medium is."""

    def audit(self) -> None:
        """Make keys, usage and lifetimes agree with the blobs that are there."""

    def clear(self) -> None:
        """Remove everything in this medium's place, of all processes, and the place itself."""

    def close(self) -> None:
        """Close connections. Idempotent."""
