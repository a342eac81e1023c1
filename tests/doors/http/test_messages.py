"""Anthropic's client against /v1/messages: texts, marks, tools, streams, counts and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvlinker.base.errors import EngineClosedError
from kvlinker.doors.http.answers.chat import TextPart
from kvlinker.doors.http.messages.requests import ToolResultBlock
from kvlinker.doors.http.messages.routes import arguments_of
from kvlinker.llm import LLM
from kvlinker.service.agents.tool_waits import FIRST_SECONDS
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import MODEL_NAME, Served, serving, tiny_model, tiny_settings
from tests.doors.http.test_tools import REASONING_TEMPLATE
from tests.schemas import check
from tests.waiting import wait_until

BIGGEST = sys.float_info.max
PATH = "/v1/messages"
GREEDY = {"temperature": 0}  # which Anthropic's client does not send by itself
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]
HANDBOOK = "\n".join(
    f"Rule {number}: whoever is late brings {number} cakes for all." for number in range(12)
)
MARK: Any = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Varna"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": SCHEMA,
}
A_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
)
CALLED: Any = {
    "type": "tool_use",
    "id": "c1",
    "name": "get_weather",
    "input": {"city": "Oslo", "days": 3},
}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c1", "content": "Sunny."}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def speaking(faked: Served) -> Iterator[anthropic.Anthropic]:
    """A client of a server whose engine says what it is told to."""
    with anthropic.Anthropic(base_url=faked.url, api_key="none", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    fields: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": QUESTION,
        "max_tokens": 300,
        "extra_body": GREEDY,
    }
    return client.messages.create(**(fields | options))


def test_the_answer_is_that_of_chat_completions(
    served: Served, client: anthropic.Anthropic
) -> None:
    answer = ask(client, system="Be brief.", max_tokens=6)
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    chat = served.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0}
    ).json()
    assert answer.content[0].text == chat["choices"][0]["message"]["content"]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL_NAME)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat["usage"]["prompt_tokens"],
        6,
    )


def test_marks_become_chunks_in_system_and_content(client: anthropic.Anthropic) -> None:
    rules = HANDBOOK.replace("cakes", "pears")
    system: Any = [{"type": "text", "text": "The house."}, {"type": "text", "text": rules, **MARK}]
    content = [{"type": "text", "text": "Letter."}, {"type": "text", "text": rules[:400], **MARK}]
    usages = []
    for name in ("Ann", "Bo"):
        messages = [
            {"role": "user", "content": [{"type": "text", "text": f"I am {name}."}, *content]}
        ]
        answer = ask(client, system=system, messages=messages, max_tokens=2)
        usages.append(answer.usage)
    first, second = usages
    assert first.cache_creation_input_tokens > 500
    assert first.cache_read_input_tokens == 0
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens > 0.9 * first.cache_creation_input_tokens
    totals = [
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        for usage in usages
    ]
    assert totals[0] == totals[1] + 1, "a name of three letters and one of two"
    assert [cache["created"] for cache in answer.model_extra["link"]["context_caches"]] == [
        False,
        False,
    ]


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(model=MODEL_NAME, **fields).input_tokens
    assert counted == ask(client, max_tokens=1, **fields).usage.input_tokens
    assert counted > client.messages.count_tokens(model=MODEL_NAME, messages=QUESTION).input_tokens


def test_a_tool_is_called_and_its_result_taken(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    answer = ask(client, tools=[WEATHER], tool_choice=choice)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    check(SCHEMA, call.input)
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": HANDBOOK, **MARK}],
    }
    messages = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks!"}]},
    ]
    again = ask(client, messages=messages, tools=[WEATHER], max_tokens=2)
    assert again.model_extra["link"]["context_caches"][0]["tokens"] > 400


def test_any_tool_and_one_at_a_time(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = ask(client, tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]


def test_a_form_is_enforced(client: anthropic.Anthropic) -> None:
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert answer.stop_reason == "end_turn"
    check(SCHEMA, json.loads(answer.content[0].text))


def test_streams_say_what_whole_answers_do(client: anthropic.Anthropic) -> None:
    fields: Any = {
        "model": MODEL_NAME,
        "messages": QUESTION,
        "max_tokens": 300,
        "extra_body": GREEDY,
    }
    fields |= {
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    whole = ask(client, tools=[WEATHER], tool_choice=fields["tool_choice"])
    told = [kind for kind, _ in groupby(kind for kind in kinds if kind != "input_json")]
    assert kinds.count("content_block_delta") > 3
    assert told == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert streamed.content[0].input == whole.content[0].input  # type: ignore[union-attr]
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_are_blocks_in_order(
    speaking: anthropic.Anthropic, engine: FakeEngine, stream: bool
) -> None:
    again = A_CALL.replace("Oslo", "Lima")
    engine.script = ["Let me", " see.\n", A_CALL[:9], A_CALL[9:40], f"{A_CALL[40:]}\n", again]
    if stream:
        with speaking.messages.stream(
            model=MODEL_NAME, messages=QUESTION, max_tokens=50, tools=[WEATHER]
        ) as streaming:
            answer: Any = streaming.get_final_message()
    else:
        answer = ask(speaking, tools=[WEATHER])
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert answer.content[0].text == "Let me see."
    inputs = [block.input for block in answer.content[1:]]
    assert inputs == [{"city": "Oslo", "days": 3}, {"city": "Lima", "days": 3}]
    assert answer.stop_reason == "tool_use"
    wait_until(lambda: engine.expected == [FIRST_SECONDS])


def test_the_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"const": "one END two"}}}
    answer = ask(client, output_config=form, stop_sequences=["never said", "END"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == (
        "stop_sequence",
        "END",
        '"one ',
    )


def test_turns_are_those_of_chat_completions(served: Served) -> None:
    """Results become messages of role ``tool``, turns of one role are one, and the last of the
    assistant's goes on."""
    calls = [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello. What is the weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: Rain."},
        {"role": "user", "content": "Report\nIt rained.\n\nWell?"},
    ]
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "It rained."},
        "title": "Report",
    }
    mine = [
        {"role": "user", "content": "Hello. "},
        {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                CALLED | {"input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                RESULT | {"is_error": True, "content": "Rain."},
                document,
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    counted = served.post(f"{PATH}/count_tokens", {"system": "Be brief.", "messages": mine}).json()[
        "input_tokens"
    ]
    assert counted == served.post("/tokenize", {"messages": chat}).json()["count"]
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    shorter = served.post(f"{PATH}/count_tokens", {"messages": begun}).json()["input_tokens"]
    assert shorter < served.post("/tokenize", {"messages": begun}).json()["count"], (
        "no end of turn, and no header"
    )


def test_a_results_mark_is_for_texts_without_one() -> None:
    own: Any = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    openais: Any = {"type": "text", "text": "c", "prompt_cache_breakpoint": {"mode": "explicit"}}
    block = ToolResultBlock.model_validate(
        RESULT | MARK | {"content": [{"type": "text", "text": "a"}, own, openais]}
    )
    marks = [part.marks() for part in block.parts() if isinstance(part, TextPart)]
    assert marks == [
        MARK,
        {"cache_control": own["cache_control"]},
        {"prompt_cache_breakpoint": {"mode": "explicit"}},
    ]
    (whole,) = ToolResultBlock.model_validate(RESULT | MARK).parts()
    assert isinstance(whole, TextPart)
    assert whole.marks() == MARK


@pytest.mark.parametrize("empty", [None, "", []])
def test_what_is_empty_may_be_an_empty_list(served: Served, empty: Any) -> None:
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [CALLED]},
        {"role": "user", "content": [RESULT]},
    ]
    turns[-1]["content"] = [RESULT | {"content": empty}]
    answer = served.post(f"{PATH}/count_tokens", {"messages": turns, "system": empty})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("beyond", [0, 1, 100_000])
def test_an_answer_is_as_long_as_there_is_room(
    faked: Served, engine: FakeEngine, beyond: int
) -> None:
    window = engine.max_model_len
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": window + beyond}
    answer = faked.post(PATH, body).json()
    usage = answer["usage"]
    assert (answer["stop_reason"], usage["input_tokens"] + usage["output_tokens"]) == (
        "model_context_window_exceeded",
        window,
    )


def test_answers_are_no_longer_than_the_server_allows(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlinker.service.startup.EmbeddedEngine", lambda *_, **__: engine)
    settings = tiny_settings(tmp_path, max_answer_tokens=3)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        answer = running.post(PATH, {"messages": QUESTION, "max_tokens": 100})
    assert answer.json()["usage"]["output_tokens"] == 3, answer.text


def test_a_prompt_without_room_for_an_answer_is_refused(served: Served) -> None:
    """By the real engine, which cuts nothing itself."""
    window = served.llm.max_model_len
    answer = served.post(
        PATH, {"messages": [{"role": "user", "content": "a" * window}], "max_tokens": window}
    )
    assert answer.status_code == 400
    assert "Shorten" in answer.json()["error"]["message"]
    with served.http.stream(  # which ends here: the rest of the window is not waited for
        "POST", PATH, json={"messages": QUESTION, "max_tokens": window, "stream": True}
    ) as answer:
        assert answer.status_code == 200
        assert "message_start" in next(answer.iter_lines())


ALWAYS_REASONING = REASONING_TEMPLATE.replace(
    "enable_thinking is defined and not enable_thinking", "false"
)


@pytest.mark.parametrize(
    ("template", "ends"),
    [(REASONING_TEMPLATE, True), (ALWAYS_REASONING, False)],
    ids=["can", "cannot"],
)
def test_reasoning_is_turned_off_where_the_chat_template_can(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, ends: bool
) -> None:
    monkeypatch.setattr("kvlinker.service.startup.EmbeddedEngine", lambda *_, **__: engine)
    settings = tiny_settings(tmp_path, chat_template=template)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        assert running.llm.answer_form.reasoning is not None
        silent, usual = (
            running.post(f"{PATH}/count_tokens", {"messages": QUESTION, "thinking": {"type": kind}})
            for kind in ("disabled", "adaptive")
        )
    assert (silent.status_code, usual.status_code) == (200, 200), silent.text
    assert (silent.json()["input_tokens"] > usual.json()["input_tokens"]) == ends


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "'c1'"),
    ({"messages": [{"role": "user", "content": [CALLED]}]}, "tool_use"),
    ({"max_tokens": None}, "max_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "some"}}, "thinking.type"),
    ({"tools": [WEATHER, WEATHER]}, "same name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"link": {"policy": "nothing"}}, "nothing"),
]


class TestMistakes:
    """Each is an error as Anthropic's API has it."""

    def test_of_fields(self, served: Served, subtests: pytest.Subtests) -> None:
        for fields, said in MISTAKES:
            with subtests.test(said, fields=fields):
                answer = served.post(PATH, {"messages": QUESTION, "max_tokens": 2} | fields)
                assert answer.status_code == 400, answer.text
                error = answer.json()
                assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
                assert said in error["error"]["message"]
                assert error["request_id"] == answer.headers["x-request-id"]

    def test_as_the_client_raises_them(self, keyed: Served, client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as missing:
            ask(
                client,
                messages=[
                    {"role": "user", "content": [{"type": "context_cache", "id": "cc_none"}]}
                ],
            )
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with (
            anthropic.Anthropic(base_url=keyed.url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(anthropic.AuthenticationError),
        ):
            ask(stranger)

    def test_half_way(self, faked: Served, engine: FakeEngine) -> None:
        engine.fails_at, engine.failure = 1, EngineClosedError("closed")
        answer = faked.post(PATH, {"messages": QUESTION, "max_tokens": 5, "stream": True})
        told = json.loads(answer.text.rpartition("event: error\ndata: ")[2])
        assert told == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "closed"},
            "request_id": answer.headers["x-request-id"],
        }

    def test_half_way_as_the_client_raises_it(
        self, speaking: anthropic.Anthropic, engine: FakeEngine
    ) -> None:
        engine.fails_at = 1
        with (
            pytest.raises(anthropic.APIStatusError, match="log says why"),
            speaking.messages.stream(model=MODEL_NAME, messages=QUESTION, max_tokens=5) as stream,
        ):
            stream.until_done()


def test_keys_may_come_as_anthropics_client_sends_them(keyed: Served) -> None:
    with anthropic.Anthropic(base_url=keyed.url, api_key="key-alpha", max_retries=0) as client:
        assert ask(client, max_tokens=1).usage.output_tokens == 1
        assert (
            client.beta.messages.count_tokens(model=MODEL_NAME, messages=QUESTION).input_tokens > 0
        )


ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    (
        '{"days": 1e999, "of": [-1e999, {"a": 2.5}',
        {"days": BIGGEST, "of": [-BIGGEST, {"a": 2.5}]},
    ),
    ('{"days": NaN}', {"days": None}),
    ('{"days": 1' + "0" * 5000 + "}", {}),
    ('{"days": 3, "ci', {"days": 3}),
    ("[1]", {}),
    ("", {}),
]


def test_arguments_are_numbers_that_json_has(subtests: pytest.Subtests) -> None:
    """A model may write any digits."""
    for text, told in ARGUMENTS:
        with subtests.test(text[:40]):
            assert arguments_of(text) == told
            assert json.loads(json.dumps(arguments_of(text), allow_nan=False)) == told
