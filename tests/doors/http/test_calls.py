"""Calls of tools wherever an answer is cut and whatever stops it, in every dialect: never text, and
in streams as in whole answers. vLLM's tests run these, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import anthropic
import openai
import pytest

from kvlinker.llm import LLM
from tests.doors.http.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Asked, Told, check_told
from tests.doors.http.serving import TEMPLATE, Served, serving
from tests.doors.http.test_tools import PARAMETERS, QUESTION, TIME, WEATHER, closing
from tests.prompting.test_answer_forms import TEMPLATES
from tests.schemas import check

CALLING = TEMPLATE.replace("<|start|>", "<|im_start|>") + "{# <tool_call> #}"
"""The chat template of a model that calls tools as Qwen3 does."""

ONE = Asked(choice="get_weather", several=False, temperature=0)
"""A question that has one call for an answer, and always the same."""

dialects = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.fixture(scope="module")
def marked(llm_with: Callable[[str], LLM]) -> Iterator[Served]:
    """A server of random weights, in whose vocabulary the marks of calls are tokens."""
    llm = llm_with(CALLING)
    with serving(llm, llm.settings, closes=False) as running:
        yield running


def blanks(served: Served) -> dict[str, int]:
    """No weight on space between tokens of JSON: vLLM's llguidance lets it repeat."""
    return {str(token): -100 for mark in " \n\t\r" for token in served.llm.token_ids(mark)}


def begun(served: Served, weight: float) -> dict[str, float]:
    """More weight on the token with which calls begin."""
    return {str(served.llm.tokenizer.convert_tokens_to_ids("<tool_call>")): weight}


@pytest.mark.parametrize(
    "dialect",
    ["chat", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("messages", "responses"))],
)
def test_a_call_is_never_text(marked: Served, dialect: str) -> None:
    """For every cut of one answer: first no call, then its name, then more and more arguments."""
    ask = DIALECTS[dialect].ask
    whole = ask(marked, ONE)
    ((name, arguments),) = whole.calls
    check(PARAMETERS[name], json.loads(arguments))
    last = [whole.tokens - 2, whole.tokens - 1, whole.tokens]
    cuts = [*range(1, last[0], 1 + last[0] // 3), *last]
    told = [ask(marked, replace(ONE, max_tokens=cut)) for cut in cuts]
    ends = [each.end for each in told[-3:]]  # vLLM's answers have one token more: their end
    assert ends in (["length", "length", "calls"], ["length", "calls", "calls"])
    assert {each.text for each in told} == {""}
    seen = [each.calls[0][1] if each.calls else None for each in told]
    assert [there for there, _ in groupby(text is not None for text in seen)] == [False, True]
    begins = [text for text in seen if text is not None]
    if dialect == "messages":  # where a call's input is an object
        objects = [json.loads(text) for text in begins]
        assert all(one.items() <= two.items() for one, two in pairwise(objects))
    else:
        assert all(arguments.startswith(text) for text in begins)
        assert sorted(begins, key=len) == begins
    assert begins[-1] == arguments


@pytest.mark.parametrize(
    ("dialect", "choice"),
    [
        ("chat", "required"),
        pytest.param("chat", "get_weather", marks=pytest.mark.matrix),
        *(
            pytest.param(dialect, choice, marks=pytest.mark.matrix)
            for dialect in ("messages", "responses")
            for choice in ("get_weather", "required")
        ),
    ],
)
def test_stops_end_text_not_calls(marked: Served, dialect: str, choice: str) -> None:
    asked = replace(ONE, choice=choice, tools=[WEATHER])
    free = DIALECTS[dialect].ask(marked, asked)
    assert free.end == "calls"
    for stop in (["\n", "<"], ['"', "{"]):
        assert DIALECTS[dialect].ask(marked, replace(asked, stop=stop)) == free
    if dialect != "messages":
        tokens = {"stop_token_ids": list({token for mark in '"{:,' for token in
                                          marked.llm.token_ids(mark)})}  # fmt: skip
        assert DIALECTS[dialect].ask(marked, replace(asked, sampling=tokens)) == free


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_under_auto_a_call_that_has_begun_is_one_of_a_tool(marked: Served, dialect: str) -> None:
    """Whatever the model would rather say; the schema holds without ``strict``. Stops count in the
    text before it alone."""
    wrong = {str(token): 6 for token in marked.llm.token_ids("get_news hours")}
    quote = marked.llm.token_ids('"')
    ends = []
    for seed in (2, 3):
        bias = wrong | closing(marked) | blanks(marked) | begun(marked, 9)
        asked = Asked(max_tokens=150, sampling={"seed": seed, "logit_bias": bias})
        told = DIALECTS[dialect].ask(marked, asked)
        check_told(told, asked)
        assert told.calls
        stopping = {**asked.sampling, "stop_token_ids": list(quote)}
        stopped = replace(asked, stop=["\n", '"', "</"], sampling=stopping)
        assert DIALECTS[dialect].ask(marked, stopped) == told
        ends.append(told.end)
    assert "calls" in ends


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_stop_tokens_end_text_where_calls_may_come(marked: Served, dialect: str) -> None:
    (cat,) = marked.llm.token_ids(" cat")
    sampling = {"logit_bias": {str(cat): 100}, "stop_token_ids": [cat], "seed": 1}
    told = DIALECTS[dialect].ask(marked, Asked(sampling=sampling))
    assert told == Told("", (), "stop", 1)


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_parallel_calls_come_in_order(marked: Served, dialect: str) -> None:
    bias = closing(marked) | blanks(marked)
    bias |= {str(token): -50 for token in marked.llm.token_ids("\n")}  # between calls
    bias[str(marked.llm.tokenizer.eos_token_id)] = -100
    asked = Asked(
        choice="required", tools=[WEATHER], max_tokens=200, sampling={"seed": 1, "logit_bias": bias}
    )
    told = DIALECTS[dialect].ask(marked, asked)
    check_told(told, asked)
    assert len(told.calls) > 1


@dialects
def test_calls_stream_piece_by_piece(marked: Served, dialect: str) -> None:
    """The name comes before the arguments are there, and these as they are sampled."""
    api = DIALECTS[dialect]
    events = api.events(marked, api.body(ONE))
    (named,) = [place for place, event in enumerate(events)
                if is_named(dialect, event)][:1]  # fmt: skip
    told = [event for event in events[named + 1 :] if is_more(dialect, event)]
    assert len(told) > 10


def is_named(dialect: str, event: Any) -> bool:
    """True for the event with which a call begins."""
    match dialect:
        case "chat":
            return any(choice.delta.tool_calls for choice in event.choices)
        case "messages":
            return bool(event.type == "content_block_start")
    return bool(event.type == "response.output_item.added")


def is_more(dialect: str, event: Any) -> bool:
    """True for an event that has more of a call's arguments, and not all of them."""
    match dialect:
        case "chat":
            return any(choice.delta.tool_calls for choice in event.choices)
        case "messages":
            return bool(event.type == "content_block_delta")
    return bool(event.type == "response.function_call_arguments.delta")


def test_an_answer_that_its_grammar_ends_with_the_last_token_is_whole(marked: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    body = {"messages": QUESTION, "response_format": form}
    reasons = []
    for most in range(1, 7):
        answer = marked.post(CHAT.path, body | {"max_tokens": most}).json()
        (choice,) = answer["choices"]
        is_whole = choice["message"]["content"] == '"yes"'
        assert choice["finish_reason"] == ("stop" if is_whole else "length")
        assert is_whole or answer["usage"]["completion_tokens"] == most
        reasons.append(choice["finish_reason"])
    assert reasons[0] == "length" != reasons[-1]


@pytest.mark.whole
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_of_calls_is_cut_alike(name: str, llm_with: Callable[[str], LLM]) -> None:
    known = TEMPLATES[name].replace("[THINK]", "").replace("<think>", "")  # calls, at once
    llm = llm_with(TEMPLATE + "{# " + known + " #}")
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": "required", "seed": 3}
    fields["logit_bias"] = {token: 4.0 for mark in '"}],' for token in llm.token_ids(mark)}
    whole = llm.chat_completion(QUESTION, **fields, max_tokens=300)
    assert whole.tool_calls
    for tokens in range(1, 40, 3):
        answer = llm.chat_completion(QUESTION, **fields, max_tokens=tokens)
        assert answer.text == ""
        assert [call.name for call in answer.tool_calls] == [
            call.name for call in whole.tool_calls[: len(answer.tool_calls)]
        ]
        for call, complete in zip(answer.tool_calls, whole.tool_calls, strict=False):
            assert complete.arguments.startswith(
                call.arguments.rstrip("\ufffd")
            )  # half a character


def test_a_call_that_was_cut_is_shown_as_far_as_it_came(marked: Served) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Varna", "note": "as soo'}
    call = {"id": "c1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    turns = [*QUESTION, turn, *QUESTION]
    tokens = marked.post("/tokenize", {"messages": turns, "tools": [WEATHER]}).json()["tokens"]
    text = marked.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    shown = text.rpartition('"arguments": ')[2]
    assert json.JSONDecoder().raw_decode(shown)[0] == {"city": "Varna", "note": "as soo"}
    function["arguments"] = '{"city": "Varna"}}'
    refused = marked.post(CHAT.path, {"messages": turns, "max_tokens": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT.path, {"tool_choice": "auto"}),
        (CHAT.path, {"tool_choice": "required", "tools": []}),
        (CHAT.path, {"tool_choice": {"type": "function", "function": {"name": "get_time"}}}),
        (MESSAGES.path, {"tool_choice": {"type": "auto"}, "max_tokens": 1}),
        (MESSAGES.path, {"tool_choice": {"type": "any"}, "max_tokens": 1}),
    ],
)
def test_a_choice_without_tools_is_refused(
    marked: Served, path: str, fields: dict[str, Any]
) -> None:
    answer = marked.post(path, {"model": "default", "messages": QUESTION, **fields})
    assert answer.status_code == 400
    assert "tool_choice" in answer.text


def test_what_chooses_nothing_is_taken(marked: Served) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "tool_choice": "none"}
    assert marked.post(CHAT.path, body).status_code == 200
    auto = {"input": "Hi", "tool_choice": "auto", "max_output_tokens": 1}
    assert marked.post(RESPONSES.path, auto).status_code == 200


@pytest.mark.whole
@pytest.mark.parametrize("cut", [300, 40])
def test_anthropics_client_puts_streamed_calls_together(marked: Served, cut: int) -> None:
    asked = replace(ONE, max_tokens=cut)
    body = MESSAGES.body(asked)
    extra = {"temperature": body.pop("temperature")}
    with (
        anthropic.Anthropic(base_url=marked.url, api_key="none") as client,
        client.messages.stream(**body, extra_body=extra) as stream,
    ):
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use"
    assert MESSAGES.ask(marked, asked).calls == ((block.name, json.dumps(block.input)),)


@pytest.fixture
def client(marked: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{marked.url}/v1", api_key="none") as made:
        yield made


def test_openais_client_puts_streamed_calls_together(marked: Served, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CHAT.body(ONE)) as stream:
        deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert len(deltas) > 5
    assert message.content is None
    calls = [call.function for call in message.tool_calls or ()]
    told = tuple((call.name, call.arguments) for call in calls)
    assert told == CHAT.ask(marked, ONE).calls
    body = CHAT.body(replace(ONE, max_tokens=40))
    with (
        pytest.raises(openai.LengthFinishReasonError),
        client.chat.completions.stream(**body) as stream,
    ):
        stream.get_final_completion()


@pytest.mark.whole
def test_openais_client_puts_responses_together(marked: Served, client: openai.OpenAI) -> None:
    body = RESPONSES.body(ONE)
    extra = {"stop": body.pop("stop")}
    with client.responses.stream(**body, extra_body=extra) as stream:
        (item,) = stream.get_final_response().output
    assert item.type == "function_call"
    assert ((item.name, item.arguments),) == RESPONSES.ask(marked, ONE).calls
    body["max_output_tokens"] = 40
    with client.responses.stream(**body, extra_body=extra) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
