"""Of the sampled tokens, those are kept that are the answer's text, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from kvlinker.base.events import Events
from kvlinker.base.types.answers import AnswerPiece, Delta, Timing, Usage
from kvlinker.base.types.chunks import KeptAnswer
from kvlinker.engines.contract.contract import AnswerKV, Finished, GenerationEvent
from kvlinker.prompting.answer_forms.reader import PlainReader, Reader
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.service.context_caches import ContextCaches
from kvlinker.service.context_caches.kept_answers import AnswerKeeper, KeepRequest
from tests.toy_tokenizers import byte_level
from tests.waiting import PATIENCE

ENCODER = TextEncoder(byte_level())


class Parts:
    """Reads an answer that has these parts, whatever its text."""

    is_over = False

    def __init__(self, *pieces: AnswerPiece) -> None:
        self._pieces = pieces

    def feed(self, text: str) -> list[AnswerPiece]:
        return list(self._pieces)

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        return []


class Made:
    """Stands for the creation of context caches, and notes the tokens of the last."""

    span: tuple[int, int] | None = None

    def keep_answer(self, chunk: Any, kv: Any, **_: Any) -> Any:
        self.span = kv
        return SimpleNamespace(id="cc_1", tokens=len(chunk))


def keep(
    sampled: Sequence[str | int], text: str, reader: Reader | None = None, part: Any = "answer"
) -> tuple[tuple[int, int] | None, KeptAnswer]:
    """Keep an answer of these tokens, by their texts or ids, of which the caller was told the
    ``text``; returns the tokens [begin, end) that were kept, and what was told of it."""
    tokens = [
        token
        for each in sampled
        for token in ([each] if isinstance(each, int) else ENCODER.encode_data(each))
    ]
    made, flag = Made(), Flag()
    told: list[KeptAnswer] = []

    def take(_: int, event: GenerationEvent) -> None:
        if isinstance(event, Finished):
            assert event.kept is not None
            told.append(event.kept)
            flag.set()

    keeper = AnswerKeeper(
        ENCODER, cast(ContextCaches, SimpleNamespace(creation=made)), Events(), ttl=60
    )
    request = KeepRequest(part, None, PlainReader if reader is None else lambda: reader)
    sink = keeper.watch(take, request, tenant="one", salt="")
    kv = AnswerKV(np.array([1, 2]), np.array(tokens), False, cast(Any, lambda *span: span))
    sink(0, Delta(text, tuple(tokens)))
    sink(0, Finished("stop", Usage(0, 0, 0), Timing(0, 0, 0, 0), answer_kv=kv))
    assert flag.wait(PATIENCE)
    keeper.close()
    return made.span, told[0]


def test_a_stop_string_is_not_kept() -> None:
    assert keep(["The cat", " sat"], "The cat")[0] == (0, len(ENCODER.encode_data("The cat")))
    inside = [" question"]  # one token, within which the stop string "est" began
    assert len(ENCODER.encode_data(inside[0])) == 1
    span, told = keep(["The cat", *inside], "The cat qu")
    assert span is None
    assert told.id is None
    assert told.reason is not None
    assert "no tokens of its own" in told.reason


def test_special_tokens_that_were_sampled_are_not_kept_as_text() -> None:
    special = byte_level().convert_tokens_to_ids("<|start|>")
    assert keep(["The cat", special, " sat"], "The cat sat")[0] is None
    assert keep(["The cat", special, " sat"], "The cat sat", part="all")[0] is not None


def test_other_tokens_for_the_same_text_are_kept() -> None:
    (whole,) = ENCODER.encode_data(" question")
    spelled = [token for letter in " question" for token in ENCODER.encode_data(letter)]
    assert spelled != [whole]
    assert keep(spelled, " question")[0] == (0, len(spelled))


def test_the_text_is_found_before_calls_that_quote_it_and_behind_the_reasoning() -> None:
    begin = len(ENCODER.encode_data("cat"))
    reader = Parts(AnswerPiece("content", "cat"), AnswerPiece("call", "look", "call_1"))
    assert keep(["cat", " {", "cat"], "cat {cat", reader)[0] == (0, begin)
    reader = Parts(AnswerPiece("reasoning", "cat cat"), AnswerPiece("content", "cat"))
    thought = ["cat", " ", "cat", "<|"]
    before = sum(len(ENCODER.encode_data(text)) for text in thought)
    assert keep([*thought, "cat"], "", reader)[0] == (before, before + begin)


def test_an_answer_that_a_stop_string_left_empty_says_nothing() -> None:
    span, told = keep([" question"], "")
    assert (span, told.reason) == (None, "It says nothing.")
