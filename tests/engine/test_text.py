import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlinker.engine.output import TextStream
from kvlinker.research.bench.shapes import byte_tokenizer

TOKENIZER = byte_tokenizer()


def stream(text, stop=()):
    """Push a text byte by byte, as a byte-level model may; returns the pieces that came out, and the stream."""
    out = TextStream(TOKENIZER, stop)
    pieces = []
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        pieces.append(out.push(token))
        if out.stopped:
            break
    pieces.append(out.finish())
    return pieces, out


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語テキスト", "👩‍👩‍👧 family", "tab\tand\nnewline", " lead"]
)
def test_characters_come_out_whole(text):
    pieces, _ = stream(text)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_an_incomplete_character_ends_as_a_replacement():
    ids = TOKENIZER("é", add_special_tokens=False)["input_ids"][:1]
    out = TextStream(TOKENIZER, ())
    assert out.push(ids[0]) == ""
    assert out.finish() == "�"


def test_special_tokens_are_not_text():
    out = TextStream(TOKENIZER, ())
    assert out.push(TOKENIZER.bos_token_id) == ""
    assert out.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", ["wor"], "hello "),
        ("hello world", ["xyz"], "hello world"),
        ("aab", ["ab"], "a"),
        ("abababc", ["ababc"], "ab"),
        ("one END two", ["END", "one E"], ""),
        ("stop", ["stop"], ""),
        ("almost sto", ["stop"], "almost sto"),
        ("日本語", ["本"], "日"),
    ],
)
def test_nothing_behind_a_stop_string_comes_out(text, stop, expected):
    pieces, out = stream(text, stop)
    assert "".join(pieces) == expected
    assert out.stopped == (expected != text)


@settings(max_examples=200, deadline=None)
@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_stopping_equals_cutting_the_whole_text(text, stop):
    ends = [text.find(s) + len(s) for s in stop if s in text]
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(s) for s in stop if s in seen)]
    pieces, _ = stream(text, stop)
    assert "".join(pieces) == expected
