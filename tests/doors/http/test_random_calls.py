"""Conversations with tools at random, in every dialect: whatever cuts or stops an answer, it tells
text and calls apart, in a stream as in the whole, and may be sent back. vLLM's tests run some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.llm import LLM
from kvlinker.settings import load_settings
from tests.doors.http.dialects import DIALECTS, Asked, check_told
from tests.doors.http.serving import Served, serving
from tests.doors.http.test_calls import begun, dialects, marked  # noqa: F401
from tests.doors.http.test_tools import closing
from tests.properties import examples

QUESTIONS = (
    "What is the weather in Oslo?",
    "What time is it?",
    "And the weather in Varna, for 3 days? And the time there?",
    "Hi!",
    'Say "}", please, and <tool_call> behind it.',
)
STOPS = st.lists(
    st.sampled_from(["\n", '"', "{", "}", ":", "<", "tool", "name", " ", "a", "</"]), max_size=3
)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the model in the box."""
    state = tmp_path_factory.mktemp("box")
    configured = load_settings(state_dir=state, kv_slots=16_384, prefix_cache="off")
    with serving(LLM.from_settings(configured), configured) as running:
        yield running


def converse(
    served: Served, dialect: str, data: st.DataObject, *, longest: int, biased: bool
) -> None:
    """``biased``: calls begin and end more often than random weights would have it."""
    sampling: dict[str, Any] = {}
    if dialect != "messages":
        sampling["seed"] = data.draw(st.integers(0, 1000))
        stops = st.lists(st.sampled_from(served.llm.token_ids('"{}: a')), max_size=2)
        sampling["stop_token_ids"] = data.draw(stops)
        if biased:
            weight = data.draw(st.sampled_from([0, 5]))
            sampling["logit_bias"] = closing(served) | begun(served, weight)
    asked = Asked(
        question=data.draw(st.sampled_from(QUESTIONS)),
        choice=data.draw(st.sampled_from(["auto", "required", "get_weather"])),
        max_tokens=data.draw(st.integers(1, longest)),
        several=data.draw(st.booleans()),
        stop=data.draw(STOPS),
        temperature=data.draw(st.sampled_from([0, 0.7, 1.2] if sampling else [0, 1])),
        sampling=sampling,
    )
    check_told(DIALECTS[dialect].ask(served, asked), asked)


@pytest.mark.whole
@dialects
@examples(6)
@given(data=st.data())
def test_calls_hold_wherever_they_are_cut(
    marked: Served,  # noqa: F811
    dialect: str,
    data: st.DataObject,
) -> None:
    converse(marked, dialect, data, longest=60, biased=True)


@pytest.mark.whole
@dialects
@examples(240)
@given(data=st.data())
def test_many_calls_hold_on_random_weights(
    marked: Served,  # noqa: F811
    dialect: str,
    data: st.DataObject,
) -> None:
    converse(marked, dialect, data, longest=80, biased=True)


@pytest.mark.whole
@dialects
@examples(100)
@given(data=st.data())
def test_many_calls_hold_on_the_model_in_the_box(
    box: Served, dialect: str, data: st.DataObject
) -> None:
    converse(box, dialect, data, longest=50, biased=False)
