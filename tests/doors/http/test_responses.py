"""OpenAI's client against /v1/responses: inputs, tools, forms, streams, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import openai
import pydantic
import pytest

from kvlinker.base.errors import (
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    OverloadedError,
)
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import MODEL_NAME, Served
from tests.doors.http.test_messages import A_CALL, HANDBOOK, MARK, SCHEMA
from tests.schemas import check

PATH = "/v1/responses"
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
USER: Any = {"role": "user", "content": "Hi"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "Sunny."}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def speaking(faked: Served) -> Iterator[openai.OpenAI]:
    """A client of a server whose engine says what it is told to."""
    with openai.OpenAI(base_url=f"{faked.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **options: Any) -> Any:
    fields: dict[str, Any] = {
        "model": MODEL_NAME,
        "input": "What is the weather?",
        "max_output_tokens": 300,
        "temperature": 0,
    }
    return client.responses.create(**(fields | options))


def test_the_answer_is_that_of_chat_completions(served: Served, client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Be brief.", max_output_tokens=6, metadata={"a": "b"})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather?"},
    ]
    chat = served.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0}
    ).json()
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.instructions, answer.metadata, answer.store) == ("Be brief.", {"a": "b"}, True)
    assert answer.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == 6


def test_marked_parts_are_chunks(client: openai.OpenAI) -> None:
    text = HANDBOOK.replace("cakes", "apples")
    for read in (False, True):
        part = {"type": "input_text", "text": text, **MARK}
        question = {"type": "input_text", "text": "Who brings apples?"}
        answer = ask(
            client, input=[{"role": "user", "content": [question, part]}], max_output_tokens=1
        )
        details = answer.usage.input_tokens_details
        assert (details.cached_tokens > 300, details.cache_write_tokens > 300) == (read, not read)
    assert answer.model_extra["link"]["context_caches"]


def test_a_tool_is_called_and_its_result_taken(client: openai.OpenAI) -> None:
    first = ask(client, tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    (call,) = first.output
    assert (first.status, call.type, call.name) == ("completed", "function_call", "get_weather")
    check(SCHEMA, json.loads(call.arguments))
    items = [
        USER,
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."},
    ]
    again = ask(client, input=items, tools=[WEATHER], max_output_tokens=2)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert again.tools[0].name == "get_weather"


def test_forms_and_the_clients_own_parser(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Oslo", "Varna"]

    parsed = client.responses.parse(
        model=MODEL_NAME, input="Where?", text_format=Weather, temperature=0
    )
    assert isinstance(parsed.output_parsed, Weather)
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
    check(SCHEMA, json.loads(ask(client, text=form).output_text))


def test_streams_say_what_whole_answers_do(client: openai.OpenAI) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    events = list(ask(client, stream=True, **fields))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds.count("function_call_arguments.delta") > 3
    assert [kind for kind, _ in groupby(kinds)] == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = ask(client, **fields)
    assert events[-1].response.output[0].arguments == whole.output[0].arguments
    assert events[-1].response.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_are_items_in_order(
    speaking: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.script = ["Let me", " see.\n", A_CALL[:9], A_CALL[9:]]
    fields: Any = {"model": MODEL_NAME, "input": "Weather?", "tools": [WEATHER | {"strict": False}]}
    if stream:
        with speaking.responses.stream(**fields) as streaming:
            answer: Any = streaming.get_final_response()
    else:
        answer = speaking.responses.create(**fields)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.output_text == "Let me see."
    assert json.loads(answer.output[1].arguments) == {"city": "Oslo", "days": 3}


def test_items_are_the_messages_of_chat_completions(served: Served) -> None:
    call = {"name": "get_weather", "arguments": "{}"}
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hm.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "status": "completed", **call},
        OUTPUT,
        {"role": "user", "content": "Thanks!"},
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hm.", "tool_calls": [{"id": "c1", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
        {"role": "user", "content": "Thanks!"},
    ]
    answer = served.post(PATH, {"input": items, "max_output_tokens": 1}).json()
    assert (
        answer["usage"]["input_tokens"]
        == served.post("/tokenize", {"messages": chat}).json()["count"]
    )


def test_the_item_of_a_stream_that_is_cut_is_incomplete(speaking: openai.OpenAI) -> None:
    events = list(ask(speaking, stream=True, max_output_tokens=3))
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert (last.type, last.response.output) == ("response.incomplete", [done])
    assert (done.status, done.content[0].text) == ("incomplete", "w0 w1 w2 ")


def test_the_item_before_a_call_that_ends_with_the_answer_is_whole(
    speaking: openai.OpenAI, engine: FakeEngine
) -> None:
    """Also where the answer was cut: its last item is the call."""
    engine.script = [f"See.\n{A_CALL}", " \n"]
    tools: Any = {"tools": [WEATHER | {"strict": False}], "max_output_tokens": 1}
    events = list(ask(speaking, stream=True, **tools))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == [
        ("message", "completed"),
        ("function_call", "completed"),
    ]
    assert (events[-1].type, events[-1].response.output) == ("response.incomplete", done)


def test_parts_begin_empty(speaking: openai.OpenAI, engine: FakeEngine) -> None:
    """Also of text that is clear only at the end: space before what may be a call."""
    engine.script = [" \n"]
    events = list(ask(speaking, stream=True, tools=[WEATHER | {"strict": False}]))
    (added,) = [event for event in events if event.type == "response.content_part.added"]
    (delta,) = [event for event in events if event.type == "response.output_text.delta"]
    assert (added.part.text, delta.delta) == ("", " \n")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (KVLinkerError("broken"), "server_error"),
        (EngineClosedError("closed"), "server_error"),
        (OverloadedError("too much", retry_after=1), "rate_limit_exceeded"),
        (InvalidRequestError("too complex"), "invalid_prompt"),
    ],
)
def test_a_failure_half_way_is_told(
    speaking: openai.OpenAI, engine: FakeEngine, failure: KVLinkerError, code: str
) -> None:
    engine.fails_at, engine.failure = 1, failure
    *_, last = ask(speaking, stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", code)
    assert last.response.error.type == failure.code


def test_a_bug_half_way_is_told_as_a_failure_of_the_servers(
    speaking: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kvlinker.doors.http.answers.answer_blocks.BlockReader.feed", broken)
    *_, last = ask(speaking, stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")
    assert "a bug" in caplog.text
    assert "a bug" not in last.response.error.message


def test_nothing_is_queued_where_no_reader_can_be_made(
    faked: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise InvalidRequestError("no reader", param="messages")

    monkeypatch.setattr("kvlinker.service.reading.reader.RequestTools.reader", broken)
    assert faked.post(PATH, {"input": "Hi"}).json()["error"]["param"] == "input"
    assert engine.requests == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [USER, OUTPUT]}, "input.1.call_id"),
    (
        {"input": [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "[1]"}]},
        "input.0.arguments",
    ),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"include": [5]}, "include.0"),
    ({"service_tier": 1}, "service_tier"),
    *(
        (
            {
                "tools": [WEATHER | {"parameters": {"a": "\ud800"}}],
                "tool_choice": "none",
                "stream": stream,
            },
            "tools.0.parameters",
        )
        for stream in (False, True)
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
        "text.format.schema",
    ),
]


def test_what_is_refused_is_named(served: Served, subtests: pytest.Subtests) -> None:
    for fields, param in REFUSED:
        with subtests.test(param, fields=fields):
            body = json.dumps(
                {"input": "Hi"} | fields
            )  # the client's own cannot write halves of surrogate pairs
            answer = served.http.post(
                PATH, content=body, headers={"content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                answer.text
            )


def test_an_unknown_context_cache_is_named_by_its_place(served: Served) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "context_cache", "id": "cc_none"}]
    answer = served.post(
        PATH, {"instructions": "b", "input": [USER, {"role": "user", "content": parts}]}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        404,
        "context_cache_not_found",
        "input.1.content.1.id",
    )
