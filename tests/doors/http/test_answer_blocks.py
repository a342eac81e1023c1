"""The tokens of each block of an answer."""

from __future__ import annotations

from kvlinker.base.types.answers import AnswerPiece, TokenLogprob
from kvlinker.doors.http.answers.answer_blocks import BlockReader
from kvlinker.prompting.answer_forms.reader import PlainReader

BYTES = (b"a", b"\xf0\x9f", b"\xa6", b"\x8a<", b"mark>", b"b c", b"\xc3")
"""Tokens by id: a character of three, a mark, a text, and a character that is cut."""


class Marks(PlainReader):
    """Leaves marks out, and tells the text of a token in two pieces."""

    def feed(self, text: str) -> list[AnswerPiece]:
        text = text.replace("<mark>", "")
        pieces = [text] if " " not in text else [text[:2], text[2:]]
        return [AnswerPiece("content", piece) for piece in pieces if piece]


def test_tokens_go_with_the_text_that_they_are_parts_of() -> None:
    blocks = BlockReader(Marks(), lambda entry: BYTES[entry.token_id])
    told = [
        (step.text, [entry.token_id for entry in step.logprobs])
        for text, ids in (("a", [0]), ("", [1, 2]), ("🦊<mark>", [3, 4]), ("b c", [5]), ("�", [6]))
        for step in blocks.feed(text, [TokenLogprob(number, "", 0.0) for number in ids])
        if step.what == "go on"
    ]
    assert told == [("a", [0]), ("🦊", [1, 2, 3]), ("b ", [5]), ("c", []), ("�", [6])]
