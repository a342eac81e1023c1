"""Bodies of all APIs name their chunks alike; what is no prompt names nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.residency import text_name
from kvlinker_fleet.naming import PromptOutline, outline_of, response_name

ID = {"type": "context_cache", "id": "cc_1"}
MARKED = {"type": "text", "text": "a text", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [ID, MARKED]}]},
        {"prompt": [ID, MARKED]},
        {"input": [{"role": "user", "content": [ID, MARKED]}]},
        {"system": [ID], "messages": [{"role": "user", "content": [MARKED]}]},
        {"messages": [{"role": "user", "content": [ID]}], "documents": [{"text": "a text"}]},
    ],
)
def test_all_forms_name_the_same(body: dict[str, Any]) -> None:
    names = {chunk.name for chunk in outline_of(body, "default").chunks}
    assert names == {"cc_1", text_name("a text", "default")}


def test_tenants_texts_have_names_of_their_own() -> None:
    body = {"documents": [{"text": "a text"}]}
    (one,), (other,) = (outline_of(body, tenant).chunks for tenant in ("anna", "bert"))
    assert one.name != other.name


def test_a_conversation_begins_as_its_earlier_request() -> None:
    turns = [{"role": "user", "content": f"turn {n}"} for n in range(4)]
    before = outline_of({"messages": turns[:2]}, "anna").beginnings
    after = outline_of({"messages": turns}, "anna").beginnings
    assert after[:2] == before
    assert [length for _, length in after] == sorted(length for _, length in after)
    assert outline_of({"messages": turns}, "bert").beginnings[0] != after[0]
    assert outline_of({"system": "x", "messages": turns}, "anna").beginnings[0] != after[0]


def test_chunks_do_not_count_as_text_of_their_own() -> None:
    long = {"type": "text", "text": "w " * 2000, "cache_control": {"type": "ephemeral"}}
    ((_, length),) = outline_of({"messages": [{"content": [long]}]}, "anna").beginnings
    assert length < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "content", "documents", "text", "type", "id", "system"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(JSON)
def test_no_body_is_too_strange(body: object) -> None:
    assert isinstance(outline_of(body, "default"), PromptOutline)


LONG = "A first line that is long enough to be known by itself.\nshort\n" * 5
SECOND = "  A second line, with white space around it that says nothing.  "


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LONG + SECOND}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG + SECOND}]}]},
        {"system": LONG + SECOND, "messages": []},
        {"prompt": LONG + SECOND},
        {"instructions": "Be brief.", "input": LONG + SECOND},
    ],
)
def test_plain_texts_are_known_by_their_long_lines(body: dict[str, Any]) -> None:
    names = [line.name for line in outline_of(body, "anna", recognised=True).lines]
    lines = "A first line that is long enough to be known by itself.", SECOND.strip()
    assert names == [text_name(line, "anna") for line in lines]
    assert outline_of(body, "anna").lines == ()
    for implicit in ("auto", "structure"):
        assert outline_of(body | {"link": {"implicit": implicit}}, "anna").lines
    assert not outline_of(body | {"link": {"implicit": "off"}}, "anna", recognised=True).lines


def test_what_is_marked_or_short_has_no_lines() -> None:
    marked = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [{"role": "user", "content": [marked, {"type": "text", "text": SECOND}]}],
        "documents": [{"text": LONG}],
    }
    outline = outline_of(body, "anna", recognised=True)
    assert outline.lines == ()
    assert len(outline.chunks) == 1


def test_lines_are_not_counted_as_a_conversations_text_again() -> None:
    text = "\n".join(f"Line {number} is long enough to be known." for number in range(9))
    body = {"messages": [{"role": "user", "content": text}]}
    lines, plain = outline_of(body, "anna", recognised=True), outline_of(body, "anna")
    known = sum(line.tokens for line in lines.lines)
    assert lines.beginnings[0][1] == pytest.approx(plain.beginnings[0][1] - known, abs=1)


def test_a_kept_response_is_the_beginning_of_what_goes_on_from_it() -> None:
    body = {"input": [{"role": "user", "content": "And?"}], "previous_response_id": "resp_1"}
    ((name, _),) = outline_of(body, "anna").beginnings
    assert name == response_name("resp_1", "anna")
    assert name not in (response_name("resp_1", "bert"), response_name("resp_2", "anna"))
