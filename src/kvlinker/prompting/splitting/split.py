"""KVSplit: a text into the pieces that become chunks, for context caches made from long inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.texts import Piece
from kvlinker.prompting.encoding import TextEncoder, require_unicode
from kvlinker.prompting.splitting.limit import TokenLimit
from kvlinker.prompting.splitting.splitter import find_splitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_PIECE_TOKENS = 1_000_000


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
