"""Passages that come again are noticed, however they are joined with others."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.service.implicit import seen_lines as seen_lines_module
from kvlinker.service.implicit.seen_lines import SeenLines, units_of


def document(name: str, lines: int = 6) -> str:
    return "\n".join(
        f"Line {number} of document {name}, which goes on for a while." for number in range(lines)
    )


def units(text: str) -> list[str]:
    return [text[unit.begin : unit.end] for unit in units_of(text, 0, len(text))]


def seen(seen_lines: SeenLines, text: str) -> list[str]:
    passages = [text[begin:end] for begin, end in seen_lines.seen(units_of(text, 0, len(text)))]
    seen_lines.note(units_of(text, 0, len(text)))
    return passages


def test_units_are_lines() -> None:
    assert units("# Title\n\n  A line.  \r\n\n\nEnd.\n") == ["# Title", "A line.", "End."]
    assert units("") == units("\n \n") == []
    assert units("x\n\n" * 500) == [], "shreds"


@pytest.mark.parametrize("joint", ["\n\n", "\n", "\n\n---\n\n", "\r\n\r\n"])
def test_documents_in_another_order_are_seen_one_by_one(joint: str) -> None:
    seen_lines = SeenLines()
    a, b, c = map(document, "abc")
    assert seen(seen_lines, f"Answer by this:\n{joint.join([a, b, c])}\n\nQuestion: who?") == []
    assert seen(seen_lines, f"Answer by this:\n{joint.join([c, b, a])}\n\nQuestion: where?") == [
        c,
        b,
        a,
    ]


def test_short_passages_stay_text() -> None:
    seen_lines = SeenLines()
    text = "A line that is long enough to be a unit, but no passage."
    assert seen(seen_lines, text) == seen(seen_lines, text) == []


def test_units_that_were_seen_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_lines_module, "MOST_SIGHTS", 23)
    seen_lines = SeenLines()
    for name in "abc":
        seen(seen_lines, document(name))
    assert len(seen_lines) == 23
    assert seen(seen_lines, document("c")) == [document("c")]
    assert seen(seen_lines, document("a")) == []


@given(st.text("ab \n\r\t", max_size=300))
def test_units_are_apart_and_bare(text: str) -> None:
    end = 0
    for unit in units_of(text, 0, len(text)):
        assert end <= unit.begin < unit.end
        assert text[unit.begin : unit.end].strip() == text[unit.begin : unit.end]
        end = unit.end


@pytest.mark.parametrize(
    "text", ["a" + " " * 100_000, "\n" * 100_000, "a \n" * 30_000, " \n" * 50_000, "a" * 100_000]
)
def test_strange_texts_take_no_longer(text: str) -> None:
    begun = time.thread_time()
    units_of(text, 0, len(text))
    assert time.thread_time() - begun < 5
