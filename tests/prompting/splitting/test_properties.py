"""What holds for every text, method and tokenizer."""

from contextlib import suppress
from itertools import pairwise

import regex
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.splitting import Piece, split_text
from tests.properties import examples
from tests.toy_tokenizers import byte_level, metaspace, unigram, word_level

ENCODERS = [
    TextEncoder(tokenizer)
    for tokenizer in (
        byte_level(),
        metaspace("first"),
        metaspace("prepend"),
        word_level(),
        unigram(),
    )
]
FAMILY, FLAG, ACCENTED = "👩‍👩‍👧", "🇩🇪", "e\u0301\u0323"

whitespace = [*"   \n\n\t\r\f", "\r\n", "\n\n", " \n \n", "\u00a0", "\u3000"]
words = [
    "The cat",
    "dog",
    "...!?",
    "1.",
    "Dr.",
    "e.g.",
    "</s>",
    "<|end|>",
    "# Title",
    "## ",
    "```",
    "~~~~",
    "- ",
]
other = [
    FAMILY,
    FLAG,
    ACCENTED,
    "é",
    "😀",
    "漢字",
    "。",
    "」",
    "। ",
    "한국",
    "\u200b",
    "\0",
    "\u2028",
]
fragments = st.sampled_from([*whitespace, *words, *other])
texts = st.one_of(st.lists(fragments, max_size=60).map("".join), st.text(max_size=60))
METHODS = ("fixed", "sentence", "paragraph", "passage", "markdown")
methods = st.sampled_from(METHODS)
encoders = st.sampled_from(ENCODERS)


def split(text: str, encoder: TextEncoder, method: str, max_tokens: int) -> tuple[Piece, ...]:
    assume(text.strip())
    if max_tokens < 5:  # a character may be four bytes and a space
        with suppress(InvalidRequestError):
            return split_text(text, tokenizer=encoder, method=method, max_tokens=max_tokens)
        assume(False)
    return split_text(text, tokenizer=encoder, method=method, max_tokens=max_tokens)


def tokens(encoder: TextEncoder, text: str) -> int:
    return len(encoder.encode_data(text))


@examples(400)
@given(text=texts, encoder=encoders, method=methods, max_tokens=st.integers(1, 24))
@example(text="a" * 100, encoder=ENCODERS[0], method="fixed", max_tokens=1)
@example(text="😀" * 20, encoder=ENCODERS[2], method="sentence", max_tokens=5)
def test_nothing_is_lost_and_no_piece_is_over_the_limit(
    text: str, encoder: TextEncoder, method: str, max_tokens: int
) -> None:
    pieces = split(text, encoder, method, max_tokens)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text for piece in pieces)
    assert all(text[piece.start : piece.end] == piece.text for piece in pieces)
    assert [piece.tokens for piece in pieces] == [tokens(encoder, piece.text) for piece in pieces]
    assert max(piece.tokens for piece in pieces) <= max_tokens


@examples(300)
@given(text=texts, encoder=encoders, method=methods, max_tokens=st.integers(5, 30))
def test_user_perceived_characters_within_the_limit_stay_whole(
    text: str, encoder: TextEncoder, method: str, max_tokens: int
) -> None:
    pieces = split(text, encoder, method, max_tokens)
    characters = {match.span() for match in regex.finditer(r"\X", text)}
    whole = {start for start, _ in characters} | {len(text)}
    end = 0
    for piece in pieces:
        end += len(piece.text)
        if end not in whole:
            start, stop = next((start, stop) for start, stop in characters if start < end < stop)
            assert tokens(encoder, text[start:stop]) > max_tokens


@examples(300)
@given(text=texts, encoder=encoders, method=methods, max_tokens=st.integers(5, 30))
def test_a_piece_is_blank_only_where_it_fits_no_neighbour(
    text: str, encoder: TextEncoder, method: str, max_tokens: int
) -> None:
    pieces = split(text, encoder, method, max_tokens)
    for before, piece in pairwise(pieces):
        if not before.text.strip() or not piece.text.strip():
            assert tokens(encoder, before.text + piece.text) > max_tokens


@examples(100)
@given(text=texts, encoder=encoders, method=methods)
def test_short_runs_of_whitespace_are_never_a_piece(
    text: str, encoder: TextEncoder, method: str
) -> None:
    assume(not regex.search(r"\s{8}", text))
    pieces = split(text, encoder, method, max_tokens=32)
    assert all(piece.text.strip() for piece in pieces)


@examples(100)
@given(text=texts, encoder=encoders, method=methods)
def test_without_need_semantic_pieces_are_not_cut(
    text: str, encoder: TextEncoder, method: str
) -> None:
    """A limit that nothing reaches changes nothing, and where it is reached only what is over it is
    cut."""
    assume(method in ("sentence", "paragraph"))
    natural = split(text, encoder, method, 10_000)
    limited = iter(split(text, encoder, method, 40))
    for piece in natural:
        first = next(limited)
        if piece.tokens <= 40:
            assert first == piece
        else:
            rest = first.text
            while len(rest) < len(piece.text):
                rest += next(limited).text
            assert rest == piece.text
