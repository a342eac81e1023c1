"""Passages are joined as frameworks do it, and what is marked is compared with them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.prompting.segments import Passage, PromptText
from kvlinker.service.implicit import caches
from kvlinker_lab import joining
from kvlinker_lab.joining import Recognised, Template, find_template, recognise

PASSAGES = ["First passage.\n\n", "  The second one."]


def test_passages_stand_bare_where_the_template_says() -> None:
    joined = Template("own", "Read:\n{context}\nNow: {question} ({question})", between=" | ").join(
        PASSAGES, "Who?"
    )
    assert joined.text == "Read:\nFirst passage. | The second one.\nNow: Who? (Who?)"
    assert [joined.text[begin:end] for begin, end in joined.passages] == [
        "First passage.",
        "The second one.",
    ]


def test_templates_have_names_or_are_spelled() -> None:
    assert find_template("plain").name == "plain"
    assert find_template("{question} {context}") == Template("own", "{question} {context}")
    for wrong in ("langchains", "{context} {context} {question}", "{context}"):
        with pytest.raises(InvalidRequestError, match="is no template"):
            find_template(wrong)


def test_frameworks_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_framework")
    module.PROMPT = "C: {context_str} Q: {query_str}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_framework", module)
    monkeypatch.setitem(
        joining.FRAMEWORKS, "langchain", (("no_such_module", "a_framework"), "PROMPT")
    )
    assert find_template("langchain") == Template("langchain", "C: {context} Q: {question}")
    monkeypatch.setitem(joining.FRAMEWORKS, "langchain", (("no_such_module",), "PROMPT"))
    with pytest.raises(InvalidRequestError, match="not installed"):
        find_template("langchain")


class Finding:
    """Finds what stands between given characters."""

    def __init__(self, *found: tuple[int, int]) -> None:
        self.found = found

    def read(self, texts: list[PromptText], *, tenant: str) -> caches.Recognised:
        (text,) = texts
        return caches.Recognised([Passage(text, *span) for span in self.found])


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ([], Recognised(29, 0, 0, 0)),
        ([(2, 16)], Recognised(29, 14, 0, 1)),
        ([(0, 10)], Recognised(29, 8, 2, 0)),
        ([(2, 16), (17, 32)], Recognised(29, 29, 0, 2)),
        ([(2, 32)], Recognised(29, 29, 1, 0)),
    ],
)
def test_marks_are_compared_with_passages(marks: list[tuple[int, int]], found: Recognised) -> None:
    joined = Template("own", "> {context}?{question}", between="|").join(PASSAGES, "Who?")
    finding: Any = Finding(*marks)
    assert recognise(finding, joined, tenant="anna") == found
