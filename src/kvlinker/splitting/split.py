"""KVSplit: a text into pieces that become chunks; for context caches made from long inputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlinker.errors import InvalidRequestError
from kvlinker.prompt.encoding import TextEncoder, require_unicode
from kvlinker.splitting.cutting import PieceCutter
from kvlinker.splitting.markdown import sections
from kvlinker.splitting.paragraphs import paragraphs
from kvlinker.splitting.sentences import sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_PIECE_TOKENS = 1_000_000


class SplitMethod(StrEnum):
    """What a piece is. Whatever is over the token limit is cut within.

    ``FIXED``: as many tokens as the limit allows. ``SENTENCE`` and ``PARAGRAPH``: one each. ``PASSAGE``: whole
    paragraphs, as many as fit. ``MARKDOWN``: the section under one heading, or its passages.
    """

    FIXED = "fixed"
    SENTENCE = "sentence"
    PARAGRAPH = "paragraph"
    PASSAGE = "passage"
    MARKDOWN = "markdown"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text; ``tokens`` is the number of ids of a chunk with this text."""

    text: str
    tokens: int


def split_text(
    text: str, *, tokenizer: PreTrainedTokenizerFast | TextEncoder, method: SplitMethod | str, max_tokens: int = 512
) -> tuple[Piece, ...]:
    """Cut ``text`` into pieces of at most ``max_tokens`` tokens (EPIC's KVSplit); joined, they are the text again.

    No cut goes through a character, and none through a user-perceived one that is within the limit. Whitespace goes
    with a neighbour: a piece is blank only where a run of whitespace is itself about as long as the limit.
    Time is linear in the text. Pass a ``PromptBuilder.encoder`` as ``tokenizer`` to save copying the vocabulary.

    Raises InvalidRequestError for a blank or invalid text (``input``), an unknown method (``split.method``), a limit
    out of range, or one that a single character exceeds (``split.max_tokens``).
    """
    try:
        method = SplitMethod(method)
    except ValueError:
        allowed = ", ".join(SplitMethod)
        raise InvalidRequestError(
            f"'split.method' must be one of {allowed}, not {method!r}.", param="split.method"
        ) from None
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_PIECE_TOKENS:
        raise InvalidRequestError(
            f"'split.max_tokens' must be an integer from 1 to {MAX_PIECE_TOKENS}, not {max_tokens!r}.",
            param="split.max_tokens",
        )
    require_unicode(text, param="input")
    if not text.strip():
        raise InvalidRequestError("'input' is empty: it needs text that is not only whitespace.", param="input")
    encoder = tokenizer if isinstance(tokenizer, TextEncoder) else TextEncoder(tokenizer)
    cutter = PieceCutter(encoder, max_tokens)
    pieces = cutter.without_blanks(_pieces(text, method, cutter))
    return tuple(Piece(piece, count) for piece, count in zip(pieces, cutter.counts(pieces), strict=True))


def _pieces(text: str, method: SplitMethod, cutter: PieceCutter) -> list[str]:
    match method:
        case SplitMethod.FIXED:
            return cutter.cut(text)
        case SplitMethod.SENTENCE:
            return cutter.limited(_blanks_joined(sentences(text)))
        case SplitMethod.PARAGRAPH:
            return cutter.limited(_blanks_joined(paragraphs(text)))
        case SplitMethod.PASSAGE:
            return _passages(text, cutter)
        case SplitMethod.MARKDOWN:
            return cutter.limited(_blanks_joined(sections(text)), cut=lambda section: _passages(section, cutter))


def _passages(text: str, cutter: PieceCutter) -> list[str]:
    return cutter.packed(_blanks_joined(paragraphs(text)))


def _blanks_joined(parts: list[str]) -> list[str]:
    """The parts, those of whitespace alone joined to the one before, or after if they come first."""
    joined: list[str] = []
    for part in parts:
        if joined and (part.isspace() or joined[-1].isspace()):
            joined[-1] += part
        else:
            joined.append(part)
    return joined
