"""What each method makes of ordinary texts, and what is refused."""

import time
from itertools import pairwise, product
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import GenerationContext
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.splitting import MAX_PIECE_TOKENS, split_text, splitters
from tests.toy_tokenizers import byte_level, metaspace, unigram, word_level

ENCODER = TextEncoder(byte_level())


def split(
    text: str, method: str, max_tokens: int = 512, encoder: TextEncoder = ENCODER
) -> list[str]:
    return [
        piece.text
        for piece in split_text(text, tokenizer=encoder, method=method, max_tokens=max_tokens)
    ]


SENTENCES = [
    ["The cat sat.", " It was fine!", " Was it?", " Yes."],
    ["One.\n", "Two\nlines.\n\n", "No stop at the end\n\n", "Three"],
    ["One.\r\n", "Two.\r\n\r\n", "Three."],
    ["Dr. Smith met Mr. J. R. Jones.", " They talked."],
    ["He lives in the U.S. and works, e.g. as a clerk, i.e. not often.", " Good."],
    ["They sell apples, pears, etc. in the market.", " It is old."],
    ["Apple Inc. is a company.", " So is Acme Ltd.", " Both are old."],
    ["See Fig. 3 and no. 7, pp. 12–15.", " He said no.", " Then he left."],
    ["Pi is 3.14 and costs $2.50.", " It was 1999.", " Then 2000 came."],
    ["1. First item.\n", "2. Second item.\n", "  3. Third item."],
    ['"Is it?" he asked.', ' "It is."', " (It really is.) She left… and so on."],
    ["Wait... what?", " Yes!!", " No?!", " Right."],
    ["今日は晴れ。", "明日は雨！", "「本当？」", "はい。"],
    ["यह एक वाक्य है।", " यह दूसरा है।"],
    ["هل أنت هنا؟", " نعم."],
    ["Neither do I.", " Nor they."],
    ["Visit www.example.com/a.html now.", " Thanks."],
    ["no capital.", " here are two sentences"],
    ["..."],
    ["  Indented.\n", "  Also.  "],
    ["**Bold.**", " _Thin._", " Plain."],
]


def test_sentences(subtests: pytest.Subtests) -> None:
    for pieces in SENTENCES:
        with subtests.test(pieces=pieces):
            assert split("".join(pieces), "sentence") == pieces


def test_sentences_of_a_long_paragraph() -> None:
    pieces = [
        "This is the first.",
        *(f" Dr. Holt wrote “sentence {n}” of them." for n in range(1000)),
    ]
    assert split("".join(pieces), "sentence") == pieces


def test_a_long_paragraph_is_cut_between_sentences() -> None:
    text = "The cat and a small dog sat on the mat. " * 20 + "\n\nIt was fine."
    for method in ("paragraph", "passage", "markdown"):
        pieces = split(text, method, max_tokens=64)
        assert "".join(pieces) == text
        assert len(pieces) > 4
        assert all(piece.rstrip().endswith(".") for piece in pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        ["One.\nStill one.\n\n", "Two.\n \t\n\n", "  Three."],
        ["One.\r\nStill one.\r\n\r\n", "Two.\r\r", "Three.\n\f\n", "Four.\n"],
        ["\n\n\nOne.\n\n\n", "Two.\n\n\n  "],
        ["One line"],
    ],
)
def test_paragraphs(pieces: list[str]) -> None:
    assert split("".join(pieces), "paragraph") == pieces


SECTIONS = [
    ["Before.\n\n", "# One\nText.\n\nMore.\n\n", "## Two #\n", "###### Six\n", "#\n", "#\tTab"],
    ["# One\r\nText.\r\n", "# Two\r\n"],
    ["#hashtag\n####### seven\n    # code\n"],
    ["   # Three spaces\nText\n", "# Next"],
    ["# Code\n```python\n# comment\n```\n", "# After"],
    ["# Code\n~~~\n# a\n```\n# b\n~~~~~\n", "# After"],
    ["# Code\n````\n# a\n```\n# b\n```` no end\n# c\n````\n", "# After"],
    ["# Inline ```code```\n```not a `fence`\n", "# After"],
    ["# Open\n```\n# never closed\n"],
    ["\n\n# Blank before\n", "# After"],
    ["Underlined\n=====\nText.\n\n", "Twice\nso\n---\nText.\n\n---\nMore.\n"],
    ["# List\n- # within\n\n> # quoted\n", "# After\0\u2028# not\n"],
]


def test_markdown_sections(subtests: pytest.Subtests) -> None:
    for pieces in SECTIONS:
        with subtests.test(pieces=pieces):
            assert split("".join(pieces), "markdown") == pieces


def test_long_markdown_sections_become_passages() -> None:
    text = "# One\n\nThe cat.\n\n" + "The dog sat on a mat.\n\n" * 6 + "# Two\n\nThe cat."
    pieces = split(text, "markdown", max_tokens=40)
    assert pieces[-1] == "# Two\n\nThe cat."
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


@pytest.mark.parametrize(
    "start", ["The", "(The"]
)  # fewer and more tokens alone than behind another paragraph
@pytest.mark.parametrize("encoder", [ENCODER, TextEncoder(metaspace("prepend"))])
def test_passages_are_as_many_whole_paragraphs_as_fit(encoder: TextEncoder, start: str) -> None:
    paragraphs = [f"{start} cat {'and a dog ' * (i % 7)}sat.\n\n" for i in range(60)]
    pieces = split("".join(paragraphs), "passage", 48, encoder)
    assert 5 < len(pieces) < 40
    rest = iter(paragraphs)
    for piece in pieces:
        whole = ""
        while len(whole) < len(piece):
            whole += next(rest)
        assert whole == piece
    for piece, following in pairwise(pieces):
        added = following[: following.index("\n\n") + 2]
        assert len(encoder.encode_data(piece + added)) > 48


def test_fixed_pieces_are_full() -> None:
    text = " ".join(["the cat"] * 500)
    pieces = split_text(text, tokenizer=ENCODER, method="fixed", max_tokens=16)
    assert {piece.tokens for piece in pieces[:-1]} == {16}
    assert len(pieces) == -(-len(ENCODER.encode_data(text)) // 16)


def test_too_long_sentences_are_cut_between_words() -> None:
    pieces = split("The cat and a small dog " * 40 + "sat.", "sentence", max_tokens=20)
    assert len(pieces) > 5
    assert all(piece.startswith(" ") for piece in pieces[1:])
    assert all(len(ENCODER.encode_data(piece)) > 10 for piece in pieces[:-1])


def test_a_line_break_ends_a_piece_that_is_cut() -> None:
    pieces = split("- the cat and a dog\r\n" * 30, "paragraph", max_tokens=40)
    assert len(pieces) > 2
    assert all(piece.endswith("\r\n") for piece in pieces)


def test_whitespace_at_the_end_takes_a_word_along_if_it_fits_nowhere() -> None:
    text = "the cat the cat"
    size = len(ENCODER.encode_data(text))
    assert split(text + "\n", "fixed", size) == ["the cat the", " cat\n"]
    assert split("\n\n" + text, "sentence", size + 1)[0].strip()


def test_whitespace_at_the_beginning_goes_with_what_follows() -> None:
    text = "\n\nThe cat and a small dog and a cat."
    limit = len(ENCODER.encode_data("\n\nThe cat and a"))
    for method in ("markdown", "passage", "paragraph", "sentence"):
        assert split(text, method, limit)[0] == "\n\nThe cat and a"


def test_whitespace_that_no_neighbour_has_room_for_is_a_piece() -> None:
    text = "a" + " \n" * 100 + "b"
    pieces = split(text, "paragraph", max_tokens=8)
    assert "".join(pieces) == text
    assert sum(not piece.strip() for piece in pieces) > 2


def test_a_part_of_a_token_may_have_more_tokens_than_the_limit() -> None:
    """``</s>`` counts as one token of the text, but is five alone; half of ``at.`` is two."""
    encoder = TextEncoder(unigram())
    pieces = split("cat sat. </s>", "fixed", 3, encoder)
    assert pieces == ["ca", "t ", "sa", "t.", " <", "/", "s>"]
    with pytest.raises(InvalidRequestError, match=r"the character '\.' alone takes 2 tokens"):
        split("The cat sat. ", "fixed", 1, TextEncoder(metaspace()))


def test_a_tokenizer_serves_as_well_as_an_encoder() -> None:
    text = "<|end|> The cat sat. It was fine."
    for tokenizer in (byte_level(), metaspace(), word_level()):
        options: dict[str, Any] = {"method": "sentence", "max_tokens": 9}
        encoder = PromptBuilder(tokenizer, context=GenerationContext.ALONE).encoder
        assert split_text(text, tokenizer=tokenizer, **options) == split_text(
            text, tokenizer=encoder, **options
        )


def test_pieces_count_what_their_chunks_have() -> None:
    built = PromptBuilder(metaspace(), context=GenerationContext.ALONE)
    pieces = split_text(
        "<s>The cat</s> sat. It was fine.\n\nYes.",
        tokenizer=built.encoder,
        method="passage",
        max_tokens=12,
    )
    assert len(pieces) > 1
    assert [piece.tokens for piece in pieces] == [
        len(built.encode_chunk(piece.text)) for piece in pieces
    ]


@pytest.mark.parametrize("text", ["", " ", "\r\n\t\f\u3000"])
def test_blank_input(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="more than whitespace") as caught:
        split(text, "fixed")
    assert caught.value.param == "text"


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a\ud800"}, "text", r"lone surrogate U\+D800"),
    (
        {"method": "words"},
        "method",
        "one of fixed, markdown, paragraph, passage, sentence, not 'words'",
    ),
    ({"max_tokens": 0}, "max_tokens", f"from 1 to {MAX_PIECE_TOKENS}, not 0"),
    ({"max_tokens": -5}, "max_tokens", "not -5"),
    ({"max_tokens": MAX_PIECE_TOKENS + 1}, "max_tokens", f"not {MAX_PIECE_TOKENS + 1}"),
    ({"max_tokens": True}, "max_tokens", "not True"),
    ({"max_tokens": 1.5}, "max_tokens", "not 1.5"),
    ({"text": "ab 😀", "max_tokens": 3}, "max_tokens", "character '😀' alone takes 4 tokens"),
]


def test_errors(subtests: pytest.Subtests) -> None:
    for method, (arguments, param, message) in product(splitters(), MISTAKES):
        with subtests.test(method, arguments=arguments):
            defaults: dict[str, Any] = {
                "text": "a b",
                "method": method,
                "max_tokens": 9,
                "tokenizer": ENCODER,
            }
            with pytest.raises(InvalidRequestError, match=message) as caught:
                split_text(**defaults | arguments)
            assert caught.value.param == param


WORST = [
    "x",
    " ",
    ".",
    ". ",
    "1. A ",
    '."',
    "\n",
    "a\n \n",
    "\r\n",
    "`",
    "# a\n",
    "e\u0301",
    "🇩🇪",
    "\u0301",
    "Dr. ",
]


@pytest.mark.whole
def test_time_is_linear_in_the_text(subtests: pytest.Subtests) -> None:
    """The worst texts for each rule; quadratic time would take minutes."""
    for text in WORST:
        with subtests.test(text=text):
            long = "a" + text * (25_000 // len(text)) + "b"
            start = time.thread_time()
            for method in splitters():
                split(long, method, max_tokens=64)
            assert time.thread_time() - start < 5


@pytest.mark.parametrize("method", ["fixed", "sentence", "paragraph", "passage", "markdown"])
def test_more_pieces_than_are_wanted_are_not_made(method, monkeypatch):
    counted = []
    count = TextEncoder.count_data

    def noting(self, texts):
        counted.extend(texts)
        return count(self, texts)

    monkeypatch.setattr(TextEncoder, "count_data", noting)
    text = "One is here.\n\nTwo are there.\n\n" * 500
    with pytest.raises(InvalidRequestError, match="more than 10 pieces") as caught:
        split_text(text, tokenizer=ENCODER, method=method, max_tokens=8, most_pieces=10)
    assert caught.value.param == "text"
    assert len(counted) < 200
