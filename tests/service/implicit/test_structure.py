"""A prompt's own structure names its pieces, and an edit changes the pieces around it alone."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.prompting.segments import Passage, PromptText, Span, TokenPlaces
from kvlinker.service.implicit.structure import (
    JOINED_TOKENS,
    LEAST_TOKENS,
    PART_TOKENS,
    pieces_of,
)
from tests.properties import examples


def source(
    text: str, messages: tuple[Span, ...] = (), definitions: tuple[Span, ...] = ()
) -> PromptText:
    """A text whose tokens are its words and punctuation with the space before them, and line feeds
    with the punctuation before these."""
    tokens = [match.span() for match in re.finditer(r"\n+| ?\w+| ?[^\w\s]+\n*| +", text)]
    edges = np.array(tokens, dtype=np.int64).reshape(-1, 2)
    return PromptText(text, TokenPlaces(edges[:, 0], edges[:, 1]), 0, messages, definitions)


def words(name: str, count: int = 80) -> str:
    return " ".join(f"{name}{number}" for number in range(count)) + "."


def pieces(*sources: PromptText) -> list[str]:
    return [piece.text for piece in pieces_of(sources)]


def tokens(piece: Passage) -> int:
    first, last = piece.tokens
    return last - first


def test_paragraphs_are_pieces_whatever_stands_between_them() -> None:
    a, b = words("a"), words("b")
    assert pieces(source(f"Read this:\n\n{a}\n\nMarch the 3rd\n\n{b}\n")) == [f"{a}\n\n", f"{b}\n"]
    assert pieces(source(f"{b}\n \n{a}\n\nApril the 4th, at noon")) == [f"{b}\n \n", f"{a}\n\n"]


def test_lines_of_a_paragraph_stay_together() -> None:
    a, b = words("a", 40), words("b", 40)
    assert pieces(source(f"{a}\n  {b}\n")) == [f"{a}\n  {b}\n"]


def test_messages_begin_pieces() -> None:
    a, b = words("a"), words("b")
    text = f"<user>\n{a}\n<tool>\n{b}\n"
    places = tuple((text.index(each), text.index(each) + len(each)) for each in (a, b))
    assert pieces(source(text, messages=places)) == [f"{a}\n<tool>\n", f"{b}\n"]


def test_definitions_of_tools_are_pieces_in_any_order() -> None:
    """In lines of their own, or in one."""
    for joint in ("\n", ", "):
        found = []
        for names in ("abc", "cab"):
            tools = [f'{{"{name}": "{words(name)}"}}' for name in names]
            text = f"[\n{joint.join(tools)}\n]\n\n{words('end')}"
            places = tuple((text.index(each), text.index(each) + len(each)) for each in tools)
            found.append(
                {piece.strip(" ,\n]") for piece in pieces(source(text, definitions=places))}
            )
        assert found[0] == found[1]
        assert len(found[0]) == 4


def test_short_paragraphs_are_joined_and_a_short_rest_is_left() -> None:
    short = [words(f"p{number}", 20) for number in range(40)]
    found = pieces_of([source("\n\n".join(short))])
    assert all(LEAST_TOKENS <= tokens(piece) < JOINED_TOKENS + 30 for piece in found)
    assert sum(map(tokens, found)) > 40 * 21 - LEAST_TOKENS
    assert pieces(source(words("a", 20))) == []


def test_long_paragraphs_are_divided_between_lines() -> None:
    lines = [words(f"l{number}", 10) for number in range(400)]
    found = pieces_of([source("\n".join(lines))])
    assert len(found) > 10
    assert all(LEAST_TOKENS <= tokens(piece) < PART_TOKENS + 20 for piece in found)
    assert all(piece.text.endswith((".\n", ".")) for piece in found)


PARAGRAPHS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 150), st.sampled_from(["\n", "\n\n"])),
    min_size=1,
    max_size=30,
)


def joined(paragraphs: list[tuple[int, int, str]]) -> str:
    return "".join(words(f"n{name}x", count) + gap for name, count, gap in paragraphs)


@given(PARAGRAPHS)
@examples(200)
def test_pieces_are_apart_and_neither_short_nor_within_tokens(
    paragraphs: list[tuple[int, int, str]],
) -> None:
    text = source(joined(paragraphs))
    found = pieces_of([text])
    assert all(one.end <= other.begin for one, other in pairwise(found))
    for piece in found:
        first, last = piece.tokens
        assert last - first >= LEAST_TOKENS
        assert text.places.starts[first] == piece.begin
        assert text.places.ends[last - 1] == piece.end


@given(PARAGRAPHS, st.data())
@examples(200)
def test_an_edit_changes_what_is_near_it(
    paragraphs: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    """From the next paragraph on that is a piece of its own, all is as before."""
    edited = [*paragraphs]
    at = data.draw(st.integers(0, len(paragraphs) - 1))
    edited[at] = (99, data.draw(st.integers(1, 150)), paragraphs[at][2])
    own = (
        number
        for number in range(at + 1, len(paragraphs))
        if paragraphs[number - 1][2] == "\n\n" and paragraphs[number][1] >= LEAST_TOKENS
    )
    first = next(own, len(paragraphs))

    def behind(paragraphs: list[tuple[int, int, str]]) -> list[str]:
        begin = len(joined(paragraphs[:first]))
        found = pieces_of([source(joined(paragraphs))])
        assert all(piece.end <= begin or piece.begin >= begin for piece in found)
        return [piece.text for piece in found if piece.begin >= begin]

    assert behind(edited) == behind(paragraphs)
