"""Prompts' texts are marked at their second sight, and where they are known."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from kvlinker.base.events import Events
from kvlinker.base.types.messages import CachedPart, ChatMessage, ContextCacheReference, MarkedText
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.service.implicit import recognition
from kvlinker.service.implicit.known import WindowHash
from kvlinker.service.implicit.recognition import Recognizer
from tests.service.implicit.test_seen_lines import document
from tests.toy_tokenizers import byte_level

ENCODER = TextEncoder(byte_level())


class Catalog:
    """Token ids of chunks by tenant, in the order in which they were entered, as ``Recognizer``
    asks for them."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, tuple[int, ...]]] = []

    @property
    def implicit(self) -> Catalog:
        return self

    def enter(self, text: str, tenant: str = "anna") -> None:
        self.entered.append((tenant, ENCODER.encode_data(text)))

    def tenants_with_answers(self) -> frozenset[str]:
        return frozenset()

    def tokens_since(
        self, number: int, tenant: str, fingerprint: str, *, limit: int
    ) -> tuple[int, list[tuple[int, ...]]]:
        return len(self.entered), [
            tokens for owner, tokens in self.entered[number:] if owner == tenant
        ]


class Reader:
    def __init__(self) -> None:
        self.catalog = Catalog()
        self.new: list[str] = []
        """What the last call told of texts that were seen for the first time."""

        made: Any = self.catalog
        self.recognizer = Recognizer(made, ENCODER, Events(), fingerprint="model")

    def marked(
        self, *messages: ChatMessage[CachedPart] | str, tenant: str = "anna", notes: bool = True
    ) -> list[str]:
        """The texts that are marked; all else is what was asked."""
        asked = [
            message if isinstance(message, ChatMessage) else user(message) for message in messages
        ]
        told, self.new = self.recognizer.mark(asked, tenant=tenant, notes=notes)
        assert [_text(message) for message in told] == [_text(message) for message in asked]
        assert [replace(message, content=()) for message in told] == [
            replace(message, content=()) for message in asked
        ]
        return [
            part.text
            for message in told
            for part in message.content
            if isinstance(part, MarkedText)
        ]


def user(*content: str | CachedPart) -> ChatMessage[CachedPart]:
    return ChatMessage("user", content)


def _answer(text: str) -> ChatMessage[CachedPart]:
    return ChatMessage("assistant", (text,))


def _calling(call_id: str) -> ChatMessage[CachedPart]:
    return ChatMessage("assistant", (), fields={"tool_calls": [{"id": call_id}]})


def _tools(*definitions: str) -> ChatMessage[CachedPart]:
    return ChatMessage("tools", definitions, fields={"tools": []})


def _text(message: ChatMessage[CachedPart]) -> str:
    return "".join(
        part.text if isinstance(part, MarkedText) else str(part) for part in message.content
    )


def joined(*documents: str, question: str) -> str:
    return "Use the context:\n\n" + "\n\n".join(documents) + f"\n\nQuestion: {question}"


def test_passages_are_marked_at_their_second_sight_and_known_then() -> None:
    reader = Reader()
    a, b, c = map(document, "abc")
    assert reader.marked(joined(a, b, question="Who?")) == []
    assert reader.marked(joined(b, c, question="Why?")) == [b]
    reader.catalog.enter(b)
    assert reader.marked(f"See {b} there.") == [b], "inside a line, too"


def test_results_of_tools_are_marked_at_their_second_sight() -> None:
    reader = Reader()
    result: ChatMessage[CachedPart] = ChatMessage(
        "tool", (document("a"),), fields={"tool_call_id": "c1"}
    )
    assert reader.marked("Who?", _calling("c1"), result) == []
    assert reader.marked("Who?", _calling("c1"), result, "Sure?") == [], "the conversation goes on"
    assert reader.marked(
        "Who?", _calling("c2"), replace(result, fields={"tool_call_id": "c2"})
    ) == [document("a")]


def test_behind_other_tools_nothing_begins_alike() -> None:
    reader = Reader()
    assert reader.marked(_tools("f"), document("a")) == []
    assert reader.marked(_tools("f"), document("a")) == []
    assert reader.marked(_tools("g"), document("a")) == [document("a")]


def test_definitions_of_tools_are_marked_at_their_second_sight() -> None:
    """In another row, that is: tools that always stand first are reused as they were computed."""
    reader = Reader()
    f, g = (
        f'{{"name": "{name}", "description": "{document(name)[:300]}"}}'.replace("\n", " ")
        for name in "fg"
    )
    assert reader.marked(_tools(f, g), "Who?") == []
    assert reader.marked(_tools(f, g), "Why?") == []
    assert reader.marked(_tools(g, f), "Who?") == [g, f]


def test_whole_parts_are_marked_at_their_second_sight() -> None:
    reader = Reader()
    text = "One line of many words. " * 20
    assert reader.marked(user(text, "Who?")) == []
    assert reader.marked(user("Listen.", text, "Why?")) == [text.strip()]


def test_known_chunks_are_found_at_first_sight() -> None:
    reader = Reader()
    a, b = "A short text of a chunk, created by name.", document("b")
    for text in (a, b):
        reader.catalog.enter(text)
    assert reader.marked(ChatMessage("tool", (f"{b}\n{a}",)), f"It says: {a}") == [b, a, a]
    assert reader.marked(f"It says: {a}", tenant="bert") == []


def test_a_prompt_is_not_its_own_second_sight() -> None:
    assert Reader().marked(document("a"), document("a")) == []


def test_other_parts_stay() -> None:
    reader = Reader()
    a = document("a")
    reader.marked("Hi.", a)
    content = (ContextCacheReference("cc_1"), MarkedText(a), f"{a}\n\n?")
    told, _ = reader.recognizer.mark([ChatMessage("user", content, "ann")], tenant="anna")
    assert told == [ChatMessage("user", (*content[:2], MarkedText(a), "\n\n?"), "ann")]


def test_a_conversation_that_goes_on_is_one_sight() -> None:
    reader = Reader()
    a, answer = document("a"), _answer("An answer. " * 40)
    assert reader.marked(a) == []
    assert reader.marked(a, answer, "And then?") == []
    assert reader.marked(a, answer, "And then?", answer, "So?") == [_text(answer).strip()], (
        "said again"
    )
    assert reader.marked("Hi.", a) == [a], "in another conversation"


def test_what_begins_as_an_earlier_prompt_is_reused_and_not_linked() -> None:
    """A prompt that is asked again, or begins with the same instructions, finds what was computed
    in just this sequence."""
    reader = Reader()
    a, b, c = map(document, "abc")
    for _ in range(3):
        assert reader.marked(joined(a, b, question="Who?")) == []
    assert reader.marked(joined(a, b, question="Why?")) == []
    assert reader.marked(joined(a, c, b, question="Why?")) == [b]
    assert reader.marked(joined(a, c, question="Where?")) == []
    assert reader.marked(ChatMessage("system", (joined(a, b, question="Who?"),))) == [
        joined(a, b, question="Who?")
    ]
    reader.catalog.enter(a)
    assert reader.marked(joined(a, b, question="When?")) == [a], (
        "what is known is recognised anywhere"
    )


def test_what_is_not_noted_was_not_seen() -> None:
    reader = Reader()
    for _ in range(3):
        assert reader.marked(document("a"), notes=False) == []


def test_requests_make_no_tables_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Mock(side_effect=WindowHash)
    monkeypatch.setattr(recognition, "WindowHash", tables)
    reader = Reader()
    for tenant in ("anna", "bert", "anna"):
        reader.marked(document("a"), tenant=tenant)
    assert tables.call_count == 1


def test_tenants_see_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "MOST_TENANTS", 1)
    reader = Reader()
    a = document("a")
    assert reader.marked(a) == reader.marked(a, tenant="bert") == []
    assert reader.marked(f"See:\n{a}", tenant="bert") == [a]
    assert reader.marked(f"See:\n{a}") == [], "forgotten for another tenant"


def test_it_takes_at_most_three_milliseconds_for_ten_thousand_characters() -> None:
    reader = Reader()
    for number in range(300):
        reader.catalog.enter(document(f"k{number}"))
    texts = [
        joined(*(document(f"{number}-{each}", 10) for each in range(20)), question="Who?")
        for number in range(9)
    ]
    assert min(map(len, texts)) > 9000
    reader.marked("load")
    seconds = []
    for text in (*texts, *texts):
        begun = time.thread_time()
        reader.recognizer.mark([user(text)], tenant="anna")
        seconds.append((time.thread_time() - begun) / len(text) * 10_000)
    assert min(seconds) < 0.003


def test_paragraphs_are_told_at_their_first_sight() -> None:
    reader = Reader()
    a, b, c = (document(name) for name in "abc")
    assert reader.marked(f"Read this.\n\n{a}\n\n{b}\n---\n{c}\n\nWho?") == []
    assert reader.new == [a, b, c], "what is short is computed as quickly"
    assert reader.marked(f"Read this.\n\n{a}\n\n{b}\n---\n{c}\n\nWhy?") == []
    assert reader.new == [], "it begins as an earlier one"
    d = document("d")
    assert reader.marked(f"See:\n{b}\n\n{d}") == [b]
    assert reader.new == [d], "what is a passage by now is not told again"
    reader.marked(document("e"), notes=False)
    assert reader.new == []
