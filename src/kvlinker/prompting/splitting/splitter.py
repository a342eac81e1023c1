"""The interface of splitters, the decorator that registers one, and the look-up by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from inspect import getdoc
from types import MappingProxyType
from typing import ClassVar, TypeVar

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.base.registry import Registry
from kvlinker.prompting.splitting.limit import TokenLimit


class Splitter(ABC):
    """Cuts texts into pieces of one kind. Its docstring describes a piece to users."""

    name: ClassVar[str]
    """The method's name in ``split_text`` and in requests."""

    @abstractmethod
    def split(self, text: str, limit: TokenLimit) -> Sequence[str]:
        """Return the pieces of ``text`` in their order; joined, they must be ``text`` again.

        ``text`` is not blank. ``limit`` counts tokens, and packs or cuts pieces. Pieces may be over
        the limit, or blank: the caller cuts the former between words, and joins the latter to a
        neighbour.
        """

    @classmethod
    def description(cls) -> str:
        """Return the class's docstring, which says what a piece is, on one line."""
        return " ".join((getdoc(cls) or "").split())


S = TypeVar("S", bound=type[Splitter])

_registry: Registry[type[Splitter]] = Registry(
    "splitter", own="kvlinker.prompting.splitting.methods", group="kvlinker.splitters"
)


def register(splitter: S) -> S:
    """Class decorator that makes ``splitter`` available under its ``name``.

    Raises ValueError when another class has that name.
    """
    _registry.add(splitter.name, splitter)
    return splitter


def splitters() -> Mapping[str, type[Splitter]]:
    """Return all registered splitters by name, installed plugins included, sorted."""
    return MappingProxyType(dict(sorted(_registry.known().items())))


def find_splitter(name: str) -> Splitter:
    """Return the splitter of this name. Raises InvalidRequestError for an unknown one."""
    known = splitters()
    if name not in known:
        raise InvalidRequestError(
            f"'method' must be one of {', '.join(known)}, not {name!r}.{did_you_mean(name, known)}",
            param="method",
        )
    return known[name]()


def cut_at(text: str, ends: Iterable[int]) -> list[str]:
    """Return the pieces of ``text`` between these positions, which ascend; joined, they are
    ``text``.

    Blank text at the beginning goes with the piece after it, other blank text with the piece
    before.
    """
    pieces: list[str] = []
    start = 0
    for end in ends:
        if not text[start:end].isspace() and start < end:
            pieces.append(text[start:end])
            start = end
    rest = text[start:]
    if pieces and not rest.strip():
        pieces[-1] += rest
    elif rest:
        pieces.append(rest)
    return pieces
