"""KVSplit: texts into the pieces that become chunks, by splitters, which are registered by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from inspect import getdoc
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvlinker.base.errors import InvalidRequestError, KVLinkerError, did_you_mean
from kvlinker.base.registry import Registry
from kvlinker.base.types.texts import Piece
from kvlinker.prompting.encoding import TextEncoder, require_unicode
from kvlinker.prompting.splitting.limit import TokenLimit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_PIECE_TOKENS = 1_000_000


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


def split_text(
    text: str,
    *,
    tokenizer: PreTrainedTokenizerFast | TextEncoder,
    method: str,
    max_tokens: int = 512,
    most_pieces: int | None = None,
) -> tuple[Piece, ...]:
    """Cut ``text`` into pieces of at most ``max_tokens`` tokens (EPIC's KVSplit); joined, they are
    the text again.

    ``method`` is the name of a splitter: ``fixed``, ``sentence``, ``paragraph``, ``passage``,
    ``markdown``, or one of a plugin. No cut goes through a character. The splitters that ship with
    kvlinker cut none through a user-perceived character that is within the limit, and take time
    linear in the text. Whitespace goes with a neighbour: a piece is blank only where a run of
    whitespace is itself about as long as the limit. Pass a ``PromptBuilder.encoder`` as
    ``tokenizer`` to save copying the vocabulary.

    Raises InvalidRequestError for a blank or invalid text, or one that makes more than
    ``most_pieces`` (``text``), an unknown ``method``, and a limit out of range or one that a single
    character exceeds (``max_tokens``).
    """
    splitter = find_splitter(method)
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_PIECE_TOKENS:
        raise InvalidRequestError(
            f"'max_tokens' must be an integer from 1 to {MAX_PIECE_TOKENS}, not {max_tokens!r}.",
            param="max_tokens",
        )
    require_unicode(text, param="text")
    if not text.strip():
        raise InvalidRequestError("The text is empty: it needs more than whitespace.", param="text")
    limit = TokenLimit(
        tokenizer if isinstance(tokenizer, TextEncoder) else TextEncoder(tokenizer),
        max_tokens,
        most_pieces,
    )
    found = list(splitter.split(text, limit))
    if "".join(found) != text:
        raise KVLinkerError(
            f"The splitter {method!r} ({type(splitter).__module__}) returned pieces that are not"
            " its text when joined."
        )
    pieces = limit.without_blanks(limit.limited([piece for piece in found if piece]))
    result: list[Piece] = []
    for piece, tokens in zip(pieces, limit.counts(pieces), strict=True):
        result.append(Piece(piece, tokens, start=result[-1].end if result else 0))
    return tuple(result)


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
