"""Calls of tools wherever an answer is cut, whatever stops it, and in every dialect: never text,
and in streams as in whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json

from kvlinker.llm import LLM
from kvlinker.settings import load_settings
from tests.doors.http.serving import TEMPLATE, Served, serving, tiny_model, tiny_settings
from tests.doors.http.test_tools import PARAMETERS, QUESTION, TIME, WEATHER, closing
from tests.prompting.test_answer_forms import TEMPLATES
from tests.schemas import check

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}

_CHUNK = TypeAdapter[Any](ChatCompletionChunk)
_MESSAGE_EVENT = TypeAdapter[Any](RawMessageStreamEvent)
_RESPONSE_EVENT = TypeAdapter[Any](ResponseStreamEvent)


def events(served: Served, path: str, body: dict[str, Any], adapter: TypeAdapter[Any]) -> list[Any]:
    """The events of a stream, each of which the SDK's own type takes."""
    answer = served.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [adapter.validate_json(each, strict=True) for each in data if each != "[DONE]"]


def chat(served: Served, **fields: Any) -> tuple[str | None, list[Any], str]:
    """Content, calls and finish reason of a chat completion; a stream says the same."""
    body = {"messages": QUESTION, "tools": [WEATHER, TIME], **fields}
    answer = served.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    whole = ChatCompletion.model_validate_json(answer.text, strict=True)
    (choice,) = whole.choices
    assert whole.usage is not None
    calls = [call.model_dump()["function"] for call in choice.message.tool_calls or ()]
    content, streamed, reason = "", list[dict[str, str]](), None
    for chunk in events(served, CHAT, body, _CHUNK):
        (told,) = chunk.choices
        content += told.delta.content or ""
        reason = told.finish_reason or reason
        for delta in told.delta.tool_calls or ():
            if delta.function.name:
                assert delta.index == len(streamed)
                assert delta.id
                streamed.append({"name": delta.function.name, "arguments": ""})
            assert delta.index == len(streamed) - 1
            streamed[-1]["arguments"] += delta.function.arguments
    assert (content, streamed, reason) == (
        choice.message.content or "",
        calls,
        choice.finish_reason,
    )
    if choice.finish_reason == "length":
        assert whole.usage.completion_tokens == body["max_tokens"]
    return choice.message.content, calls, choice.finish_reason


def check_calls(content: str | None, calls: list[Any], reason: str, *, forced: bool) -> None:
    """Text has no marks; arguments are valid, or, where the answer was cut, the beginning of JSON
    in its last call."""
    assert "<tool_call" not in (content or "")
    assert not (content or "").strip().startswith('{"name"')
    assert not (forced and content)
    assert (content is None) or not calls or content
    for index, call in enumerate(calls):
        if reason == "tool_calls" or index < len(calls) - 1:
            check(PARAMETERS[call["name"]], json.loads(call["arguments"]))
        else:
            from_json(call["arguments"] or "{", allow_partial=True)
    assert reason in ("stop", "tool_calls", "length")
    assert bool(calls) or reason != "tool_calls"
    assert not (forced and reason == "stop")


CHOICES: Any = st.sampled_from(["auto", "required", NAMED])
STOPS = st.lists(
    st.sampled_from(["\n", '"', "{", "}", ":", "<", "tool", "name", " ", "a", "</"]), max_size=3
)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of random weights, in whose vocabulary the marks of calls are tokens."""
    template = TEMPLATE.replace("<|start|>", "<|im_start|>") + "{# <tool_call> #}"
    options = tiny_settings(tmp_path_factory.mktemp("marked"), chat_template=template)
    model = tiny_model(marks=("<tool_call>", "</tool_call>", "<|im_start|>"))
    with serving(LLM.from_model(model, options), options) as running:
        yield running


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the model in the box."""
    state = tmp_path_factory.mktemp("box")
    configured = load_settings(state_dir=state, kv_slots=16_384, prefix_cache="off")
    with serving(LLM.from_settings(configured), configured) as running:
        yield running


def begun(served: Served, weight: float) -> dict[str, float]:
    """More weight on the token with which calls begin."""
    return {str(served.llm.tokenizer.convert_tokens_to_ids("<tool_call>")): weight}


def ask_at_random(served: Served, data: st.DataObject, *, longest: int, biased: bool) -> None:
    choice = data.draw(CHOICES)
    fields: dict[str, Any] = {
        "tool_choice": choice,
        "max_tokens": data.draw(st.integers(1, longest)),
        "seed": data.draw(st.integers(0, 1000)),
        "parallel_tool_calls": data.draw(st.booleans()),
        "temperature": data.draw(st.sampled_from([0, 0.7, 1.2])),
    }
    if stop := data.draw(STOPS):
        fields["stop"] = stop
    if biased:
        fields["logit_bias"] = closing(served) | begun(served, data.draw(st.sampled_from([0, 5])))
    check_calls(*chat(served, **fields), forced=choice != "auto")


@settings(max_examples=20)
@given(data=st.data())
def test_calls_hold_wherever_they_are_cut(marked: Served, data: st.DataObject) -> None:
    ask_at_random(marked, data, longest=60, biased=True)


@pytest.mark.slow
@settings(max_examples=700)
@given(data=st.data())
def test_many_calls_hold_on_random_weights(marked: Served, data: st.DataObject) -> None:
    ask_at_random(marked, data, longest=80, biased=True)


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_many_calls_hold_on_the_model_in_the_box(box: Served, data: st.DataObject) -> None:
    ask_at_random(box, data, longest=50, biased=False)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_is_never_text(served: Served, choice: Any) -> None:
    """For every cut of one answer: first no call, then its name, then more and more arguments."""
    fields: dict[str, Any] = {"tool_choice": choice, "seed": 1, "logit_bias": closing(served)}
    fields["parallel_tool_calls"] = False
    whole = chat(served, **fields, max_tokens=300)[1][0]
    seen: list[Any] = []
    reason, tokens = "length", 0
    while reason == "length":
        tokens += 3
        content, calls, reason = chat(served, **fields, max_tokens=tokens)
        assert content == (None if calls else "")
        seen.append(calls[0]["arguments"] if calls else None)
        assert whole["arguments"].startswith(seen[-1] or "")
    assert reason == "tool_calls"
    assert [kind for kind, _ in groupby(arguments is None for arguments in seen)] == [True, False]
    assert seen[-1] == whole["arguments"]
    assert sorted(filter(None, seen), key=len) == list(filter(None, seen))


def test_stop_strings_end_text_not_calls(served: Served) -> None:
    fields: dict[str, Any] = {"seed": 2, "logit_bias": closing(served), "max_tokens": 300}
    fields["parallel_tool_calls"] = False
    free = chat(served, tool_choice="required", **fields)
    for stop in (["\n"], ['"', "{"], ["<"], ["tool_call"]):
        assert chat(served, tool_choice="required", stop=stop, **fields) == free


def test_an_answer_that_its_grammar_ends_with_the_last_token_is_whole(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    body = {"messages": QUESTION, "response_format": form}
    whole = served.post(CHAT, body | {"max_tokens": 50}).json()
    tokens = whole["usage"]["completion_tokens"]
    for most, reason in ((tokens, "stop"), (tokens - 1, "length")):
        answer = served.post(CHAT, body | {"max_tokens": most}).json()
        assert (answer["choices"][0]["finish_reason"]) == reason
        assert answer["usage"]["completion_tokens"] == most
    assert answer["choices"][0]["message"]["content"] == '"yes'


def test_under_auto_a_call_that_has_begun_is_one_of_a_tool(marked: Served) -> None:
    """Whatever the model would rather say; the schema holds without ``strict``. Stop strings count
    in the text before it alone."""
    wrong = {str(token): 6 for token in marked.llm.token_ids("get_news hours")}
    bias = wrong | closing(marked) | begun(marked, 9)
    reasons = []
    for seed in range(4):
        fields = {"seed": seed, "logit_bias": bias, "max_tokens": 150}
        content, calls, reason = chat(marked, **fields)
        check_calls(content, calls, reason, forced=False)
        assert calls
        assert chat(marked, **fields, stop=["\n", '"', "</"]) == (content, calls, reason)
        reasons.append(reason)
    assert "tool_calls" in reasons


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_of_calls_is_cut_alike(name: str, tmp_path: Path) -> None:
    known = TEMPLATES[name].replace("[THINK]", "").replace("<think>", "")  # calls, at once
    options = tiny_settings(tmp_path, chat_template=TEMPLATE + "{# " + known + " #}")
    llm = LLM.from_model(tiny_model(), options)
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": "required", "seed": 3}
    fields["logit_bias"] = {token: 4.0 for mark in '"}],' for token in llm.token_ids(mark)}
    try:
        whole = llm.chat_completion(QUESTION, **fields, max_tokens=300)
        assert whole.tool_calls
        for tokens in range(1, 40, 3):
            answer = llm.chat_completion(QUESTION, **fields, max_tokens=tokens)
            assert answer.text == ""
            assert [call.name for call in answer.tool_calls] == [
                call.name for call in whole.tool_calls[: len(answer.tool_calls)]
            ]
            for call, complete in zip(answer.tool_calls, whole.tool_calls, strict=False):
                assert complete.arguments.startswith(call.arguments)
    finally:
        llm.close()


def anthropic_calls(served: Served, **fields: Any) -> tuple[list[Any], str]:
    """Blocks and stop reason of a message; a stream, as the client reads it, says the same."""
    tool = WEATHER["function"]
    body: dict[str, Any] = {
        "model": "default",
        "messages": QUESTION,
        "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}],
        **fields,
    }
    extra = {"temperature": 0}
    answer = served.post(MESSAGES, body | extra)
    whole = Message.model_validate_json(answer.text, strict=True)
    for event in events(served, MESSAGES, body | extra, _MESSAGE_EVENT):
        assert event.type
    with (
        anthropic.Anthropic(base_url=served.url, api_key="none") as client,
        client.messages.stream(**{**body, "extra_body": extra}) as stream,
    ):
        streamed = stream.get_final_message()
    blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in whole.content]
    assert blocks == [
        block.model_dump(exclude={"id", "parsed_output"}) for block in streamed.content
    ]
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    assert whole.stop_reason is not None
    return blocks, whole.stop_reason


def test_messages_tell_partial_calls(served: Served) -> None:
    seen = []
    one = {"type": "any", "disable_parallel_tool_use": True}
    for tokens in range(1, 300, 5):
        blocks, reason = anthropic_calls(served, tool_choice=one, max_tokens=tokens)
        assert [block["type"] for block in blocks] in ([], ["tool_use"])
        seen.append(len(blocks))
        if reason != "max_tokens":
            check(PARAMETERS["get_weather"], blocks[0]["input"])
            break
        assert all(block["input"].keys() <= {"city", "days"} for block in blocks)
    assert seen[0] == 0
    assert seen.count(1) > 1


def responses_items(served: Served, **fields: Any) -> tuple[list[Any], Any]:
    """Items and status of a response; a stream says the same."""
    body: dict[str, Any] = {
        "model": "default",
        "input": "What is the weather?",
        "tools": [{"type": "function", **WEATHER["function"]}],
        "temperature": 0,
        **fields,
    }
    answer = served.post(RESPONSES, body)
    whole = Response.model_validate_json(answer.text, strict=True)
    told = events(served, RESPONSES, body, _RESPONSE_EVENT)
    items = [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]
    last = told[-1].response
    assert [item.model_dump(exclude={"id", "call_id"}) for item in last.output] == items
    assert (last.status, told[-1].type) == (whole.status, f"response.{whole.status}")
    for index, item in enumerate(whole.output):
        if item.type == "function_call":
            deltas = [
                event.delta
                for event in told
                if event.type == "response.function_call_arguments.delta"
                and event.output_index == index
            ]
            assert "".join(deltas) == item.arguments
    return items, whole.status


def test_responses_tell_incomplete_calls(served: Served) -> None:
    seen = []
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    for tokens in range(1, 300, 5):
        items, status = responses_items(served, max_output_tokens=tokens, **fields)
        seen += [item["status"] for item in items[:1]]
        assert {item["type"] for item in items} <= {"function_call"}
        if status == "completed":
            break
        assert status == "incomplete"
    assert seen.index("completed") > seen.index("incomplete") == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tool_choice": "auto"}),
        (CHAT, {"tool_choice": "required", "tools": []}),
        (CHAT, {"tool_choice": NAMED}),
        (MESSAGES, {"tool_choice": {"type": "auto"}, "max_tokens": 1}),
        (MESSAGES, {"tool_choice": {"type": "any"}, "max_tokens": 1}),
    ],
)
def test_a_choice_without_tools_is_refused(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    answer = served.post(path, {"model": "default", "messages": QUESTION, **fields})
    assert answer.status_code == 400
    assert "tool_choice" in answer.text


def test_what_chooses_nothing_is_taken(served: Served) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "tool_choice": "none"}
    assert served.post(CHAT, body).status_code == 200
    auto = {"input": "Hi", "tool_choice": "auto", "max_output_tokens": 1}
    assert served.post(RESPONSES, auto).status_code == 200


def test_the_openai_client_puts_streamed_calls_together(served: Served) -> None:
    fields: Any = {"tool_choice": "required", "seed": 1, "max_tokens": 300}
    fields |= {"extra_body": {"logit_bias": closing(served)}}
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
        client.chat.completions.stream(
            model="default", messages=QUESTION, tools=[WEATHER, TIME], **fields
        ) as stream,
    ):
        deltas = [event for event in stream if event.type.startswith("tool_calls.function")]
        message = stream.get_final_completion().choices[0].message
    assert len(deltas) > 5
    assert message.content is None
    for call in message.tool_calls or ():
        check(PARAMETERS[call.function.name], json.loads(call.function.arguments))
