"""Tools as OpenAI's client uses them: definitions, choices, calls, results, streams; and reasoning
apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import MODEL_NAME, Served, serving, tiny_model, tiny_settings
from tests.schemas import check

CHAT = "/v1/chat/completions"
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Varna"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
NEWS: Any = {
    "type": "function",
    "function": {
        "name": "get_news",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"topic": {"enum": ["sport"]}},
            "required": ["topic"],
            "additionalProperties": False,
        },
    },
}
CLOSED: Any = {"additionalProperties": False}
PARAMETERS = {
    tool["function"]["name"]: tool["function"].get("parameters", {})
    for tool in (WEATHER, TIME, NEWS)
}
A_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
)


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
    fields = {
        "model": MODEL_NAME,
        "messages": QUESTION,
        "max_tokens": 300,
        "tools": [WEATHER, TIME],
    }
    return client.chat.completions.create(**(fields | options))


def closing(served: Served) -> dict[str, int]:
    """More weight on what ends strings and objects, which random weights seldom do."""
    return {str(token): 4 for mark in '"}],' for token in served.llm.token_ids(mark)}


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_are_valid(served: Served, client: openai.OpenAI, seed: int) -> None:
    answer = ask(client, tool_choice="required", n=3, seed=seed, logit_bias=closing(served))
    ended = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            assert call.type == "function"
            check(PARAMETERS[call.function.name], json.loads(call.function.arguments))
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == len(ids)


def test_a_named_function_is_called_once(served: Served, client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, tool_choice=named, seed=1, logit_bias=closing(served))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check(PARAMETERS["get_weather"], json.loads(call.function.arguments))


def test_one_call_where_several_are_not_wanted(served: Served, client: openai.OpenAI) -> None:
    answer = ask(
        client,
        tool_choice="required",
        parallel_tool_calls=False,
        n=4,
        seed=1,
        logit_bias=closing(served),
    )
    assert {
        len(choice.message.tool_calls or [])
        for choice in answer.choices
        if choice.finish_reason != "length"
    } == {1}


def endless(served: Served) -> dict[str, int]:
    """Weight that keeps answers from ending where they need not."""
    return closing(served) | {str(served.llm.tokenizer.eos_token_id): -100}


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_call_ends_the_answer(
    served: Served, client: openai.OpenAI, stream: bool
) -> None:
    nothing: Any = {"type": "object", "properties": {}} | CLOSED
    tool = {"type": "function", "function": {"name": "get_time", "parameters": nothing}}
    _, _, calls, reason = answered(
        client,
        stream=stream,
        tools=[tool],
        tool_choice="required",
        seed=1,
        logit_bias=endless(served),
    )
    assert [call.function.name for call in calls] == ["get_time"]
    assert reason == "tool_calls"


def test_calls_are_limited_by_a_setting(tmp_path: Path) -> None:
    number = {"type": "integer", "minimum": 1000, "maximum": 9999}
    numbered = {"type": "object", "properties": {"n": number}, "required": ["n"]} | CLOSED
    settings = tiny_settings(tmp_path, max_calls=2)
    with LLM.from_model(tiny_model(), settings) as llm:
        weights = {"<": 50.0, "\n": 20.0, " ": -50.0, "}": 4.0}  # another call rather than the end
        bias = {token: weights[mark] for mark in weights for token in llm.token_ids(mark)}
        answer = llm.chat_completion(
            QUESTION,
            tools=[{"type": "function", "function": {"name": "draw", "parameters": numbered}}],
            tool_choice="required",
            max_tokens=1500,
            seed=3,
            logit_bias=bias | {llm.tokenizer.eos_token_id: -100},
        )
    assert answer.finish_reason == "tool_calls"
    assert len(answer.tool_calls) == 2


def test_calls_are_told_in_streams(served: Served, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tool_choice": "required", "seed": 1, "logit_bias": closing(served)}
    options["parallel_tool_calls"] = False
    whole = ask(client, **options).choices[0]
    chunks = list(ask(client, stream=True, **options))
    first, *rest = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    (call,) = whole.message.tool_calls
    assert (first.index, first.type, first.function.name) == (0, "function", call.function.name)
    assert {(delta.index, delta.id, delta.function.name) for delta in rest} == {(0, None, None)}
    arguments = first.function.arguments + "".join(delta.function.arguments for delta in rest)
    assert arguments == call.function.arguments
    assert len(rest) > 3
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"


def answered(
    client: openai.OpenAI, *, stream: bool, **options: Any
) -> tuple[str, str, list[Any], str]:
    """Content, reasoning, calls and the reason of the end."""
    if not stream:
        choice = ask(client, **options).choices[0]
        message = choice.message
        reasoning = getattr(message, "reasoning_content", None) or ""
        return message.content or "", reasoning, message.tool_calls or [], choice.finish_reason
    with client.chat.completions.stream(
        model=MODEL_NAME, messages=QUESTION, **({"tools": [WEATHER, TIME]} | options)
    ) as streaming:
        reasoning = "".join(
            getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
            for event in streaming
            if event.type == "chunk"
        )
        choice = streaming.get_final_completion().choices[0]
    return (
        choice.message.content or "",
        reasoning,
        choice.message.tool_calls or [],
        choice.finish_reason,
    )


streamed = pytest.mark.parametrize("stream", [False, True])


@streamed
def test_the_model_may_call_if_it_likes(
    speaking: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    other = A_CALL.replace("3", "4")
    engine.script = ["Let me", " see.\n", A_CALL[:9], A_CALL[9:40], f"{A_CALL[40:]}\n", other]
    content, _, calls, reason = answered(speaking, stream=stream)
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"city": "Oslo", "days": days} for days in (3, 4)
    ]
    assert len({call.id for call in calls}) == 2
    engine.script = ["Sun", "ny.\n"]
    assert answered(speaking, stream=stream) == ("Sunny.\n", "", [], "stop")


BARE_CALL = A_CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")


@streamed
def test_a_call_without_its_marks_is_one(
    speaking: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    for script in (
        [BARE_CALL[:9], BARE_CALL[9:]],
        ["```", "json\n", BARE_CALL[:30], BARE_CALL[30:], "\n``", "`"],
    ):
        engine.script = script
        content, _, calls, reason = answered(speaking, stream=stream)
        assert (content, reason) == ("", "tool_calls")
        (call,) = calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}


@streamed
def test_json_that_was_asked_for_is_no_call(
    speaking: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.script = [BARE_CALL[:9], BARE_CALL[9:]]
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"structured_outputs": {"regex": "(?s:.*)"}}},
        {"tool_choice": "none"},
    ]
    for options in forms:
        told = answered(speaking, stream=stream, **options)
        assert told == (BARE_CALL, "", [], "stop")


@streamed
def test_without_tools_a_call_is_text(
    speaking: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.script = [A_CALL[:12], A_CALL[12:]]
    choices: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": openai.omit}, {"tools": []}]
    for options in choices:
        assert answered(speaking, stream=stream, **options) == (A_CALL, "", [], "stop")


@streamed
def test_a_call_that_is_none_is_text(
    speaking: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.script = ["<tool_call>", "{nonsense}", "</tool_call>", " more"]
    content, _, calls, reason = answered(speaking, stream=stream)
    assert (calls, reason) == ([], "stop")
    assert "nonsense" in content
    assert content.endswith(" more")


def test_strict_functions_are_called_with_valid_arguments_alone(
    served: Served, client: openai.OpenAI
) -> None:
    """Also where the model need not call them: what it says is biased towards a call, and towards
    wrong ones."""
    marks = {str(token): 6 for token in served.llm.token_ids("<tool_call>\n")}
    answer = ask(
        client, tools=[NEWS], n=16, seed=1, max_tokens=120, logit_bias=marks | closing(served)
    )
    for choice in answer.choices:
        for call in choice.message.tool_calls or ():
            check(PARAMETERS["get_news"], json.loads(call.function.arguments))
        assert (
            "<tool_call>" not in (choice.message.content or "") or choice.finish_reason == "length"
        )


def test_a_conversation_with_calls_and_results_goes_on(
    served: Served, client: openai.OpenAI
) -> None:
    first = ask(
        client,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=4,
        logit_bias=closing(served),
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    messages = [
        *QUESTION,
        message.model_dump(),
        {
            "role": "tool",
            "tool_call_id": call.id,
            "name": call.function.name,
            "content": "Sunny, 20 degrees.",
        },
        {"role": "user", "content": "Thanks!"},
    ]
    answer = ask(client, messages=messages, max_tokens=4)
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens
    prompt = served.llm.text_of(served.llm.chat_prompt(QUESTION))
    assert "Sunny" not in prompt


def test_results_may_be_context_caches(served: Served) -> None:
    (cache_id,) = served.cache("Sunny, 20 degrees, and a light breeze from the sea.")
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": ""}}
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "context_cache", "id": cache_id}],
        },
    ]
    answer = served.post(CHAT, {"messages": messages, "tools": [WEATHER, TIME], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_no_parts_are_an_empty_result(served: Served) -> None:
    """So clients tell of tools that found nothing."""
    function = {"name": "get_time", "arguments": "{}"}
    calls = [{"id": "c1", "type": "function", "function": function}]
    counts = []
    contents: tuple[list[Any] | str, ...] = ([], "")
    for content in contents:
        result = {"role": "tool", "tool_call_id": "c1", "content": content}
        called = {"role": "assistant", "content": content, "tool_calls": calls}
        body = {"messages": [*QUESTION, called, result], "tools": [TIME], "max_tokens": 2}
        answer = served.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_the_clients_own_loop(served: Served) -> None:
    """Parsed arguments, as the client's helper makes them of a function's model."""

    class GetWeather(pydantic.BaseModel):
        days: int = pydantic.Field(ge=1, le=7)

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        completion: Any = client.chat.completions.parse(
            model=MODEL_NAME,
            messages=QUESTION,
            tools=[openai.pydantic_function_tool(GetWeather)],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
            seed=1,
        )
    (call,) = completion.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_prompts_are_counted_and_explained_with_their_tools(served: Served) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER, TIME]}
    asked = served.post(CHAT, body | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert served.post("/tokenize", body).json()["count"] == asked
    assert served.post("/v1/link/explain", body).json()["tokens"] == asked
    for path in ("/tokenize", "/v1/link/explain"):
        refused = served.post(path, {"prompt": "a", "tools": [TIME]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


CALLED: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": "perhaps"}, "tool_choice"),
    (
        {
            "tools": [TIME],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
        "tool_choice",
    ),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    (
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        "tools.0.function.name",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        "tools.0.function.parameters",
    ),
    ({"tools": [TIME], "functions": [{"name": "f"}]}, "functions"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
    ([{"role": "tool", "content": "x", "tool_call_id": "c1"}], "messages.0.tool_call_id"),
    ([{"role": "user", "content": "x", "tool_calls": [CALLED]}], "messages.0.tool_calls"),
    ([{"role": "user", "content": "x", "tool_call_id": "c1"}], "messages.0.tool_call_id"),
    (
        [{"role": "assistant", "tool_calls": [{"id": "c1"}]}],
        "messages.0.tool_calls.0.function",
    ),
    (
        [
            {
                "role": "assistant",
                "tool_calls": [CALLED | {"function": {"name": "f", "arguments": "[1]"}}],
            }
        ],
        "messages.0.tool_calls.0.function.arguments",
    ),
    (
        [
            {"role": "assistant", "tool_calls": [CALLED]},
            {"role": "tool", "content": "x", "tool_call_id": "c2"},
        ],
        "messages.1.tool_call_id",
    ),
]


class TestMistakes:
    """Each is a 400 that names the field."""

    def test_of_tools(self, served: Served, subtests: pytest.Subtests) -> None:
        for fields, param in BAD_TOOLS:
            with subtests.test(param, fields=fields):
                answer = served.post(CHAT, {"messages": QUESTION, **fields})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                    answer.text
                )

    def test_of_messages(self, served: Served, subtests: pytest.Subtests) -> None:
        for messages, param in BAD_MESSAGES:
            with subtests.test(param, messages=messages):
                answer = served.post(CHAT, {"messages": messages})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                    answer.text
                )


REASONING_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor"
    " %}<|start|>assistant\n{% if enable_thinking is defined and not enable_thinking"
    " %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
def thinking(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[openai.OpenAI]:
    """A client of a server whose chat template knows reasoning."""
    monkeypatch.setattr("kvlinker.service.startup.EmbeddedEngine", lambda *_, **__: engine)
    settings = tiny_settings(tmp_path, chat_template=REASONING_TEMPLATE)
    with (
        serving(LLM.from_model(tiny_model(), settings), settings) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        yield client


@streamed
def test_reasoning_stands_apart(thinking: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    engine.script = ["<think>", "\nH", "m.\n", "</th", "ink>\n\nSun", "ny."]
    assert answered(thinking, stream=stream, tools=openai.omit) == ("Sunny.", "Hm.", [], "stop")
    engine.script = ["<think>\nHm.\n</think>\n\n", A_CALL]
    content, reasoning, calls, reason = answered(thinking, stream=stream)
    assert (content, reasoning, len(calls), reason) == ("", "Hm.", 1, "tool_calls")


def test_reasoning_may_be_sent_back(thinking: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = ["<think>Hm.</think>Sunny."]
    message = ask(thinking, tools=openai.omit).choices[0].message
    assert (
        ask(thinking, messages=[*QUESTION, message.model_dump(), *QUESTION])
        .choices[0]
        .message.content
        == "Sunny."
    )


def test_special_tokens_that_mark_calls_reach_the_reader(faked: Served, engine: FakeEngine) -> None:
    engine.script = ["x"]
    faked.post(CHAT, {"messages": QUESTION, "tools": [TIME]})
    assert engine.requests[-1].sampling.shown_tokens == faked.llm.answer_form.shown_tokens


def test_a_form_holds_where_reasoning_is_over(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, chat_template=REASONING_TEMPLATE)
    body = {
        "structured_outputs": {"regex": "[0-9]{3}"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        for seed in range(5):
            answer = running.post(CHAT, {"messages": QUESTION, "seed": seed, **body}).json()
            assert answer["choices"][0]["message"]["content"].isdecimal()
