"""The reports by which routers learn which chunks servers have, and the names that both use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

MEMORY = "memory"
"""The tier of chunks that take no time to load, whatever the server calls it."""

LEAST_LINE = 32
"""The fewest characters of a line by which a text is known; chosen by hand."""

_LINE = re.compile(r"\S[^\n]*")


def text_name(text: str, tenant: str) -> str:
    """Name the chunk of a tenant's text. A context cache's id is a name as it is."""
    return sha256(f"{tenant}\0{text}".encode(errors="surrogatepass")).hexdigest()[:24]


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines by which servers and routers identify a text within others: those that are
    long enough to be unique, without surrounding white space."""
    for match in _LINE.finditer(text):
        if len(line := match[0].rstrip()) >= LEAST_LINE:
            yield line


class KnownChunk(NamedTuple):
    """The tier from which a server can take a chunk, and its names in requests."""

    tiers: tuple[str, ...]
    """The fastest of the server's own tiers that has it, and all shared ones that have it."""

    names: tuple[str, ...]
    """There may be none yet."""


@dataclass(frozen=True, slots=True)
class TierCost:
    """The cost of loading from one of a server's tiers."""

    seconds_per_token: float | None
    """None if it was not measured yet."""

    place: str | None = None
    """Names the medium of a tier that other servers share, which then have the same chunks there;
    None for a server's own."""


@dataclass(frozen=True, slots=True)
class ResidencyReport:
    """The chunks that a server has, or the changes since another report.

    ``epoch`` names the server's run: keys of another one are forgotten. ``number`` counts reports;
    if ``whole`` is true, this one holds everything, otherwise the changes since the requested
    number.
    """

    epoch: str
    number: int
    whole: bool

    chunks: Mapping[str, KnownChunk]
    """By chunk key."""

    gone: tuple[str, ...]
    """The keys of chunks that are in none of the server's tiers any more."""
