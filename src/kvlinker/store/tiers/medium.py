"""Says what a remote tier needs of a medium for its bytes, and takes the secrets out of a medium's URL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

KEYS_AT_ONCE = 1000
"""The number of keys that a medium is asked about in one question."""


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
    """What became of a write."""

    stored: bool
    evicted: tuple[int, ...] = ()
    """The sizes in bytes of the blobs that made room."""


class BlobMedium(Protocol):
    """Keeps blobs under chunk keys, and evicts the least recently used of all servers first.

    Blobs appear whole or not at all. Methods may be called from any thread and may wait for a network; each raises
    MediumUnavailable and MediumRefused, and leaves the medium consistent when it does.
    """

    @property
    def place(self) -> str:
        """Where the medium is, without credentials, for logs."""
        ...

    @property
    def budget_bytes(self) -> int:
        """The bytes that all blobs may take together."""
        ...

    @property
    def ahead_bytes(self) -> int:
        """The bytes that one round trip brings while a blob is read layer by layer: so many that the trip itself hardly
        counts, and so few that the first layers come soon."""
        ...

    def open(self) -> tuple[int, ...]:
        """Reach the medium and evict down to the budget, also again after an outage; returns evicted sizes."""
        ...

    def stat(self, key: str) -> int | None:
        """Return the blob's size in bytes, or None where there is none. Raises BlobDamaged."""
        ...

    def touch(self, key: str) -> int | None:
        """Return what ``stat`` does; the blob is now the most recently used."""
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
        """Return the keys of all blobs, the least recently used first."""
        ...

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the bytes of those of the keys that are accounted here, with one question; at most KEYS_AT_ONCE."""
        ...

    def usage(self) -> MediumUsage:
        """Return how full the medium is."""
        ...

    def audit(self) -> None:
        """Make keys and usage agree with the blobs that are there."""
        ...

    def clear(self) -> None:
        """Remove everything that lies in this place, whoever put it there, and the place itself."""
        ...

    def close(self) -> None:
        """Give up connections. Idempotent."""
        ...


_USERINFO = re.compile(r"(?<=://)[^\s?#]*@")
_SECRET_PARAMETER = re.compile(
    r"[?&#][^=&#]*(?:pass|pwd|secret|token|key|sig|auth|cred)[^=&#]*=([^&#]+)", re.IGNORECASE
)
_HIDDEN = "***"


def place_of(url: str) -> str:
    """Return the URL without user, password, query and fragment."""
    return _USERINFO.sub("", re.split(r"[?#]", url, maxsplit=1)[0])


def redacted(text: str, url: str) -> str:
    """Return ``text`` with the URL's password, and what else in it looks like a secret, hidden wherever it stands."""
    text = text.replace(url, place_of(url))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _secrets(url: str) -> Iterator[str]:
    """Yield the URL's secrets, as written and as meant, without trusting it to be a valid one."""
    found = [match[1] for match in _SECRET_PARAMETER.finditer(url)]
    for userinfo in _USERINFO.findall(url):
        _, _, password = userinfo[:-1].rpartition(":") if ":" in userinfo else ("", "", userinfo[:-1])
        found.append(password)
    for secret in found:
        yield from {secret, unquote(secret)} - {""}
