"""Chunks stand in the order in which they stood before, and nothing else changes its place."""

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.messages import ContextCacheReference, Document, MarkedText
from kvlinker.service.reading import reader
from kvlinker.service.reading.reader import DocumentOrders

NAMES = st.lists(st.sampled_from("abcde"), unique=True, max_size=5)


def parts(names: Iterable[str]) -> list[Any]:
    return [MarkedText(name) if name < "c" else ContextCacheReference(name) for name in names]


def test_the_first_order_stays():
    known = DocumentOrders()
    first = parts("bca")
    assert known.arranged_runs("anna", first) == first
    assert known.arranged_runs("anna", parts("abc")) == first
    assert known.arranged_runs("bert", parts("abc")) == parts("abc")
    assert known.arranged_runs("anna", parts("abcd")) == parts("abcd")
    again = [MarkedText("a", ttl=60.0), *parts("cb")]
    assert known.arranged_runs("anna", again) == [*parts("bc"), again[0]]


def test_texts_part_the_runs():
    known = DocumentOrders()
    known.arranged_runs("anna", parts("ba"))
    known.arranged_runs("anna", parts("dc"))
    content = ["x", *parts("ab"), "y", *parts("cd"), "z", *parts("e")]
    expected = ["x", *parts("ba"), "y", *parts("dc"), "z", *parts("e")]
    assert known.arranged_runs("anna", content) == expected


def test_documents_are_told_apart_by_all_that_templates_show():
    known = DocumentOrders()
    both: list[Any] = [Document(MarkedText("a"), {"title": title}) for title in ("one", "two")]
    one, two = both
    known.arranged_runs("anna", [two, one])
    assert known.arranged_runs("anna", [one, two]) == [two, one]
    assert known.arranged_runs("anna", [one, one]) == [one, one]


@given(st.lists(NAMES, min_size=1, max_size=8))
def test_what_is_asked_for_again_comes_in_one_order(asked):
    known = DocumentOrders()
    orders_of: dict[frozenset[str], Any] = {}
    for names in asked:
        found = known.arranged_runs("anna", parts(names))
        assert sorted(map(repr, found)) == sorted(map(repr, parts(names)))
        assert orders_of.setdefault(frozenset(names), found) == found


def test_what_was_asked_for_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(reader, "MOST_ORDERS", 1)
    known = DocumentOrders()
    known.arranged_runs("anna", parts("ba"))
    known.arranged_runs("anna", parts("dc"))
    assert known.arranged_runs("anna", parts("ab")) == parts("ab")
