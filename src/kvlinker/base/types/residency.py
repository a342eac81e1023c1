"""What servers tell routers of the chunks that they have in memory, and by which names both know
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256


def text_name(text: str, tenant: str) -> str:
    """Name the chunk of a tenant's text. A context cache's id is a name as it is."""
    return sha256(f"{tenant}\0{text}".encode(errors="surrogatepass")).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class ResidencyReport:
    """Tells which chunks a server has in memory, or what has changed since another report.

    ``epoch`` names the server's run: keys of another one are forgotten. ``number`` counts reports;
    where ``whole`` is true, this one holds everything, else what came behind the number that was
    asked for.
    """

    epoch: str
    number: int
    whole: bool

    resident: Mapping[str, tuple[str, ...]]
    """The names of chunks that are in memory, by chunk key; a key may have none yet."""

    gone: tuple[str, ...]
    """The keys of chunks that are in memory no more."""
