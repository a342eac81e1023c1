"""Tools and forms of answers in Python are those of the server, and what cannot be is refused
alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvlinker import LLM, AnswerGrammar, AsyncLLM, Client
from kvlinker.base.errors import InvalidRequestError
from tests.doors.http.serving import Served
from tests.doors.http.test_tools import NEWS, PARAMETERS, QUESTION, TIME, WEATHER, closing
from tests.schemas import check

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"floor": {"enum": [1, 2]}},
    "required": ["floor"],
} | {"additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


@pytest.fixture
def llm(served: Served) -> LLM:
    return served.llm


def likely(served: Served) -> dict[int, float]:
    return {int(token): weight for token, weight in closing(served).items()}


CALLING: list[dict[str, Any]] = [
    {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False, "seed": 2},
    {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "seed": 1,
    },
]


@pytest.mark.parametrize(
    "fields", [*CALLING, {"response_format": FORM, "seed": 1}, {"tools": [NEWS], "seed": 1}]
)
async def test_answers_are_the_servers(served: Served, llm: LLM, fields: dict[str, Any]) -> None:
    here = llm.chat_completion(QUESTION, **fields, max_tokens=200, logit_bias=likely(served))
    with Client(served.url) as client:
        there = client.chat_completion(
            QUESTION, **fields, max_tokens=200, logit_bias=closing(served)
        )
    awaited = await AsyncLLM.from_llm(llm).chat_completion(
        QUESTION, **fields, max_tokens=200, logit_bias=likely(served)
    )
    for answer in (here, awaited):
        assert (answer.text, answer.finish_reason, answer.usage) == (
            there.text,
            there.finish_reason,
            there.usage,
        )
        assert [replace(call, id="") for call in answer.tool_calls] == [
            replace(call, id="") for call in there.tool_calls
        ]
    if fields in CALLING:
        assert here.finish_reason == "tool_calls"
        for call in here.tool_calls:
            check(PARAMETERS[call.name], json.loads(call.arguments))
    if "response_format" in fields:
        check(SCHEMA, json.loads(here.text))


def test_a_conversation_goes_on_with_calls_and_results(served: Served, llm: LLM) -> None:
    marked = WEATHER | {"cache_control": {"type": "ephemeral"}}
    first = llm.chat_completion(
        QUESTION, **CALLING[0] | {"tools": [marked, TIME]}, logit_bias=likely(served)
    )
    (call,) = first.tool_calls
    (cache,) = first.context_caches
    messages: Any = [
        *QUESTION,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    second = llm.chat_completion(messages, tools=[marked, TIME], max_tokens=2)
    assert [each.id for each in second.context_caches] == [cache.id]
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert (
        llm.chat_completion(
            QUESTION, tools=[marked], tool_choice="none", max_tokens=1
        ).context_caches
        == ()
    )


async def test_streams_have_forms_but_no_calls(llm: LLM) -> None:
    awaiting = AsyncLLM.from_llm(llm)
    pieces = await awaiting.chat_completion(QUESTION, response_format=FORM, stream=True, seed=1)
    check(SCHEMA, json.loads("".join([piece async for piece in pieces])))
    with pytest.raises(InvalidRequestError, match="no calls") as refused:
        await awaiting.chat_completion(QUESTION, tools=[TIME], stream=True)
    assert refused.value.param == "stream"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": "perhaps"}, "tool_choice"),
    (
        {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
    ),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [{"name": "get_time"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools"),
    ({"tools": [TIME | {"cache_control": {"type": "forever"}}]}, "tools.0"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": FORM, "grammar": AnswerGrammar.json_object()}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
]


def test_mistakes_name_the_argument(llm: LLM, subtests: pytest.Subtests) -> None:
    for fields, param in MISTAKES:
        with subtests.test(param, fields=fields):
            with pytest.raises(InvalidRequestError) as refused:
                llm.chat_completion(QUESTION, **fields, max_tokens=1)
            assert refused.value.param == param
