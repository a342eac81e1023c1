"""Passages that come again are noticed, however they are joined with others."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.service.implicit import sights as sights_module
from kvlinker.service.implicit.sights import Sights, units_of


def document(name: str, lines: int = 6) -> str:
    return "\n".join(f"Line {number} of document {name}, which goes on for a while." for number in range(lines))


def units(text: str) -> list[str]:
    return [text[unit.begin : unit.end] for unit in units_of(text, 0, len(text))]


def seen(sights: Sights, text: str) -> list[str]:
    passages = [text[begin:end] for begin, end in sights.seen(units_of(text, 0, len(text)))]
    sights.note(units_of(text, 0, len(text)))
    return passages


def test_units_are_lines() -> None:
    assert units("# Title\n\n  A line.  \r\n\n\nEnd.\n") == ["# Title", "A line.", "End."]
    assert units("") == units("\n \n") == []
    assert units("x\n\n" * 500) == [], "shreds"


@pytest.mark.parametrize("joint", ["\n\n", "\n", "\n\n---\n\n", "\r\n\r\n"])
def test_documents_in_another_order_are_seen_one_by_one(joint: str) -> None:
    sights = Sights()
    a, b, c = map(document, "abc")
    assert seen(sights, f"Answer by this:\n{joint.join([a, b, c])}\n\nQuestion: who?") == []
    assert seen(sights, f"Answer by this:\n{joint.join([c, b, a])}\n\nQuestion: where?") == [c, b, a]


def test_short_passages_stay_text() -> None:
    sights = Sights()
    text = "A line that is long enough to be a unit, but no passage."
    assert seen(sights, text) == seen(sights, text) == []


def test_units_that_were_seen_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sights_module, "MOST_SIGHTS", 23)
    sights = Sights()
    for name in "abc":
        seen(sights, document(name))
    assert len(sights) == 23
    assert seen(sights, document("c")) == [document("c")]
    assert seen(sights, document("a")) == []


@given(st.text("ab \n\r\t", max_size=300))
def test_units_are_apart_and_bare(text: str) -> None:
    end = 0
    for unit in units_of(text, 0, len(text)):
        assert end <= unit.begin < unit.end
        assert text[unit.begin : unit.end].strip() == text[unit.begin : unit.end]
        end = unit.end


@pytest.mark.parametrize("text", ["a" + " " * 100_000, "\n" * 100_000, "a \n" * 30_000, " \n" * 50_000, "a" * 100_000])
def test_strange_texts_take_no_longer(text: str) -> None:
    begun = time.thread_time()
    units_of(text, 0, len(text))
    assert time.thread_time() - begun < 5
