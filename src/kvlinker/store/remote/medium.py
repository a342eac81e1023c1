"""What the blob tier knows of a medium: a place beyond this machine that keeps blobs by chunk key within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

KEYS_AT_ONCE = 1000
"""That a medium is asked about in one question."""


class MediumUnavailable(Exception):  # noqa: N818 - a state, told to the availability
    """The medium does not answer, or not sensibly; the message says how."""


class MediumRefused(Exception):  # noqa: N818
    """The medium answered that it will not do this: it is full, read-only, or not allowed. It may do other things."""


class BlobGone(Exception):  # noqa: N818
    """The blob vanished while it was read: evicted or deleted by somebody."""


class BlobDamaged(Exception):  # noqa: N818
    """What lies under the key cannot be a blob that was written whole; the message says why."""


@dataclass(frozen=True, slots=True)
class MediumUsage:
    """How full a medium is, with what all servers keep there."""

    used_bytes: int
    blobs: int


@dataclass(frozen=True, slots=True)
class Written:
    """``evicted``: sizes in bytes of the blobs that made room."""

    stored: bool
    evicted: tuple[int, ...] = ()


class BlobMedium(Protocol):
    """Blobs under chunk keys, the least recently used of all servers evicted first.

    Blobs appear whole or not at all. Methods may be called from any thread and may wait for a network; each raises
    MediumUnavailable and MediumRefused, and leaves the medium consistent when it does.
    """

    @property
    def place(self) -> str:
        """Where it is, without credentials, for logs."""
        ...

    @property
    def budget_bytes(self) -> int: ...

    def open(self) -> tuple[int, ...]:
        """Reach the medium and evict down to the budget, also again after an outage; returns evicted sizes."""
        ...

    def stat(self, key: str) -> int | None:
        """The blob's size in bytes, or None. Raises BlobDamaged."""
        ...

    def touch(self, key: str) -> int | None:
        """As ``stat``; the blob is now the most recently used."""
        ...

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill ``target`` with the blob's bytes from ``start`` on. Raises BlobGone and BlobDamaged."""
        ...

    def write(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> Written:
        """Keep a blob of ``nbytes``, at most the budget, evicting for it. One that is there already stays."""
        ...

    def delete(self, key: str) -> None:
        """Remove whatever lies under the key."""
        ...

    def keys(self) -> tuple[str, ...]:
        """Least recently used first."""
        ...

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of those of the keys that are accounted here, in one question; at most KEYS_AT_ONCE."""
        ...

    def usage(self) -> MediumUsage: ...

    def audit(self) -> None:
        """Make keys and usage agree with the blobs that are there."""
        ...

    def clear(self) -> None:
        """Remove everything that lies in this place, whoever put it there, and the place itself."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
