"""Calls that were cut are read as far as they came."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.tools import parsed_arguments, template_call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


CUT: list[tuple[str, object]] = [
    ("", {}),
    (" {", {}),
    ('{"ci', {}),
    ('{"city": ', {}),
    ('{"city": "Os', {"city": "Os"}),
    ('{"city": "Oslo\\', {"city": "Oslo"}),
    ('{"city": "Oslo", "days": [1, {"a": tr', {"city": "Oslo", "days": [1, {}]}),
    ('{"city": "Oslo"} ', {"city": "Oslo"}),
]


def test_arguments_are_ended_where_they_were_cut(subtests: pytest.Subtests) -> None:
    for text, parsed in CUT:
        with subtests.test(text):
            assert parsed_arguments(text) == parsed
            call = {"id": "c1", "function": {"name": "f", "arguments": text}}
            assert template_call(call)["function"]["arguments"] == parsed


NO_BEGINNINGS = ["x", "[1", '"a', "null", '{"a": 1}}', '{"a": 1} {', '{"a" 1', "{1", '{"a":' * 9999]


def test_what_is_not_the_beginning_of_an_object_is_refused(subtests: pytest.Subtests) -> None:
    for text in NO_BEGINNINGS:
        with subtests.test(text[:20]):
            with pytest.raises(ValueError):  # noqa: PT011  which the callers put into words
                parsed_arguments(text)
            with pytest.raises(InvalidRequestError, match="a JSON object"):
                template_call({"function": {"name": "f", "arguments": text}})


@given(st.dictionaries(st.text(max_size=5), JSON), st.booleans(), st.data())
def test_every_beginning_is_read(
    arguments: dict[str, object], escaped: bool, data: st.DataObject
) -> None:
    text = json.dumps(arguments, ensure_ascii=escaped)
    assert parsed_arguments(text) == arguments
    cut = parsed_arguments(text[: data.draw(st.integers(0, len(text)))])
    assert list(cut) == list(arguments)[: len(cut)]
