"""Texts of prompts are found at their second sight, and where they are known."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvlinker.base.events import Events
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.segments import PromptText, TokenPlaces
from kvlinker.service.implicit import caches
from kvlinker.service.implicit.caches import Recognizer
from kvlinker.service.implicit.known import WindowHash
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

    def found(self, *messages: str, tenant: str = "anna", notes: bool = True) -> list[str]:
        """The texts that are found in a prompt of these messages."""
        told = self.recognizer.read([prompt(*messages)], tenant=tenant, notes=notes)
        self.new = [passage.text for passage in told.new]
        return [passage.text for passage in told.chunks]


def prompt(*messages: str, before: str = "") -> PromptText:
    """A prompt in which each message has a line before it."""
    lines = [f"<turn>\n{message}\n" for message in messages]
    ends = list(accumulate(map(len, lines)))
    spans = [(end - len(message) - 1, end - 1) for message, end in zip(messages, ends, strict=True)]
    none = np.arange(0)
    return PromptText("".join(lines), TokenPlaces(none, none), messages=tuple(spans), before=before)


def joined(*documents: str, question: str) -> str:
    return "Use the context:\n\n" + "\n\n".join(documents) + f"\n\nQuestion: {question}"


def test_passages_are_found_at_their_second_sight_and_known_then() -> None:
    reader = Reader()
    a, b, c = map(document, "abc")
    assert reader.found(joined(a, b, question="Who?")) == []
    assert reader.found(joined(b, c, question="Why?")) == [b]
    reader.catalog.enter(b)
    assert reader.found(f"See {b} there.") == [b], "inside a line, too"


def test_behind_other_texts_nothing_begins_alike() -> None:
    """As definitions of tools, which many templates print behind the system prompt."""
    reader = Reader()
    f, g = (
        f'{{"name": "{name}", "description": "{document(name)[:300]}"}}'.replace("\n", " ")
        for name in "fg"
    )
    assert reader.found("In shop.", f"{f}\n{g}", "Who?") == []
    assert reader.found("In shop.", f"{f}\n{g}", "Why?") == []
    assert reader.found("In bank.", f"{g}\n{f}", "Who?") == [g, f]
    assert reader.found("In town.", f"{g}\n{f}", "Who?") == [f"{g}\n{f}"]


def test_behind_other_chunks_nothing_begins_alike() -> None:
    reader = Reader()
    a = document("a")
    told = [
        reader.recognizer.read([prompt(a, before=before)], tenant="anna")
        for before in ("one", "one", "two")
    ]
    assert [len(each.chunks) for each in told] == [0, 0, 1]


def test_whole_messages_are_found_at_their_second_sight() -> None:
    reader = Reader()
    text = ("One line of many words. " * 20).strip()
    assert reader.found(text, "Who?") == []
    assert reader.found("Listen.", text, "Why?") == [text]


def test_known_chunks_are_found_at_first_sight() -> None:
    reader = Reader()
    a, b = "A short text of a chunk, created by name.", document("b")
    for text in (a, b):
        reader.catalog.enter(text)
    assert reader.found(f"{b}\n{a}", f"It says: {a}") == [b, a, a]
    assert reader.found(f"It says: {a}", tenant="bert") == []


def test_a_prompt_is_not_its_own_second_sight() -> None:
    assert Reader().found(document("a"), document("a")) == []


def test_a_conversation_that_goes_on_is_one_sight() -> None:
    reader = Reader()
    a, answer = document("a"), ("An answer. " * 40).strip()
    assert reader.found(a) == []
    assert reader.found(a, answer, "And then?") == []
    assert reader.found(a, answer, "And then?", answer, "So?") == [answer], "said again"
    assert reader.found("Hi.", a) == [a], "in another conversation"


def test_what_begins_as_an_earlier_prompt_is_reused_and_not_linked() -> None:
    """A prompt that is asked again, or begins with the same instructions, finds what was computed
    in just this sequence."""
    reader = Reader()
    a, b, c = map(document, "abc")
    for _ in range(3):
        assert reader.found(joined(a, b, question="Who?")) == []
    assert reader.found(joined(a, b, question="Why?")) == []
    assert reader.found(joined(a, c, b, question="Why?")) == [b]
    assert reader.found(joined(a, c, question="Where?")) == []
    assert reader.found("Hi.", joined(a, b, question="Who?")) == [joined(a, b, question="Who?")]
    reader.catalog.enter(a)
    assert reader.found(joined(a, b, question="When?")) == [a], "what is known is found anywhere"


def test_what_is_not_noted_was_not_seen() -> None:
    reader = Reader()
    for _ in range(3):
        assert reader.found(document("a"), notes=False) == []


def test_requests_make_no_tables_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Mock(side_effect=WindowHash)
    monkeypatch.setattr(caches, "WindowHash", tables)
    reader = Reader()
    for tenant in ("anna", "bert", "anna"):
        reader.found(document("a"), tenant=tenant)
    assert tables.call_count == 1


def test_tenants_see_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST_TENANTS", 1)
    reader = Reader()
    a = document("a")
    assert reader.found(a) == reader.found(a, tenant="bert") == []
    assert reader.found(f"See:\n{a}", tenant="bert") == [a]
    assert reader.found(f"See:\n{a}") == [], "forgotten for another tenant"


def test_pieces_were_seen_by_their_own_tenant_and_salt() -> None:
    recognizer = Reader().recognizer
    one, two = "01" * 32, "02" * 32
    assert recognizer.seen_before([one], tenant="anna") == set()
    assert recognizer.seen_before([one, two], tenant="anna", notes=False) == {one}
    assert recognizer.seen_before([one, two], tenant="anna") == {one}
    assert recognizer.seen_before([one, two], tenant="anna", salt="salt") == set()
    assert recognizer.seen_before([one, two], tenant="bert") == set()


def test_it_takes_as_long_as_a_few_passes_over_the_characters() -> None:
    """Some three milliseconds for ten thousand of them, on a processor of 2023."""
    reader = Reader()
    for number in range(300):
        reader.catalog.enter(document(f"k{number}"))
    texts = [
        joined(*(document(f"{number}-{each}", 10) for each in range(20)), question="Who?")
        for number in range(9)
    ]
    assert min(map(len, texts)) > 9000
    reader.found("load")
    shares = []
    for text in (*texts, *texts):
        source = prompt(text)
        begun = time.thread_time()
        sum(map(ord, text))
        passed = time.thread_time()
        reader.recognizer.read([source], tenant="anna")
        shares.append((time.thread_time() - passed) / (passed - begun))
    assert min(shares) < 10


def test_paragraphs_are_told_at_their_first_sight() -> None:
    reader = Reader()
    a, b, c = (document(name) for name in "abc")
    assert reader.found(f"Read this.\n\n{a}\n\n{b}\n---\n{c}\n\nWho?") == []
    assert reader.new == [a, b, c], "what is short is computed as quickly"
    assert reader.found(f"Read this.\n\n{a}\n\n{b}\n---\n{c}\n\nWhy?") == []
    assert reader.new == [], "it begins as an earlier one"
    d = document("d")
    assert reader.found(f"See:\n{b}\n\n{d}") == [b]
    assert reader.new == [d], "what is a passage by now is not told again"
    reader.found(document("e"), notes=False)
    assert reader.new == []


def noticed(reader: Reader, *messages: str, tenant: str = "anna") -> list[str]:
    found = reader.recognizer.notice([prompt(*messages)], tenant=tenant)
    return [passage.text for passage in found]


def test_what_would_be_found_is_noticed() -> None:
    reader = Reader()
    a, b, c = map(document, "abc")
    orders = ([a, b], [a, b], [b, c], [c, a])
    told = [noticed(reader, joined(*order, question="Who?")) for order in orders]
    assert told == [[], [], [b], [c, a]]
    assert noticed(reader, a, tenant="bert") == []
    reader.catalog.enter(document("d"))
    assert noticed(reader, document("d")) == [], "the catalog is not asked"


def test_short_passages_are_noticed_where_they_make_a_run() -> None:
    """Lines of fewer than 32 tokens each, which followed each other before."""
    reader = Reader()
    lines = [f"Line {number} says little, as others do." for number in range(12)]
    run = "\n\n".join(lines[:9])
    assert len(run) >= 256 > len("\n\n".join(lines[:3]))
    assert noticed(reader, f"One.\n\n{run}") == []
    assert noticed(reader, f"Another.\n\n{run}\n\nWho?") == [run]
    apart = "\n\n".join(line for pair in zip(lines[:6], lines[6:], strict=True) for line in pair)
    assert noticed(reader, f"Third.\n\n{apart}") == []
