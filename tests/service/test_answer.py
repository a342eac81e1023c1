"""A notebook shows an answer with what its prompt reused."""

from __future__ import annotations

from dataclasses import replace

from kvlinker.base.types.answers import Timing, Usage
from kvlinker.base.types.tools import ToolCall
from kvlinker.service.answer import Answer
from tests.linking.test_explanation import EXPLANATION

ANSWER = Answer("1 < 2", (7, 8), "stop", Usage(24, 4, 13, 2), Timing())


def test_text_usage_and_calls() -> None:
    shown = ANSWER._repr_html_()
    assert "1 &lt; 2" in shown
    assert "41 prompt tokens: 24 from the cache, 4 computed again, 13 new." in shown
    called = replace(ANSWER, text="", tool_calls=(ToolCall("id", "look", '{"at": 1}'),))
    assert "look({&quot;at&quot;: 1})" in called._repr_html_()


def test_the_prompt_where_it_was_explained() -> None:
    explained = replace(EXPLANATION, texts=("a", "b", "c", "d", "e"))
    shown = replace(ANSWER, explanation=explained)._repr_html_()
    assert ANSWER._repr_html_() in shown
    assert "bcd</span>" in shown
