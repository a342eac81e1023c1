"""What kvlinker does not know in a request is left out and named, as are pictures; what agents send
has the effect that they expect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import anthropic
import pytest

from tests.doors.http.serving import MODEL_NAME, Served, serving
from tests.doors.http.test_served_fields import (
    CHAT,
    LEAST,
    MESSAGES,
    RESPONSES,
    TEXT,
    ask,
)

GREEDY = {"temperature": 0}

MEDIA = [
    (CHAT, "image_url", "image"),
    (CHAT, "input_audio", "audio"),
    (RESPONSES, "input_image", "image"),
    (RESPONSES, "input_file", "file"),
    (MESSAGES, "image", "image"),
]


def test_a_text_stands_in_place_of_media(served: Served, subtests: pytest.Subtests) -> None:
    for path, kind, word in MEDIA:
        with subtests.test(path, kind=kind):
            field = "input" if path == RESPONSES else "messages"
            said = f"[{word} left out: this model reads text]"
            shown, told = (
                served.post(path, LEAST[path] | GREEDY | {field: [turn_of(part)]})
                for part in ({"type": kind, "url": "x"}, {"type": text_kind(path), "text": said})
            )
            assert shown.status_code == 200, shown.text
            assert text_of(path, shown.json()) == text_of(path, told.json())
            assert prompt_tokens(shown.json()) == prompt_tokens(told.json())
            assert shown.headers["x-ignored-fields"] == f"{field}.0.content.0"
            assert "x-ignored-fields" not in told.headers


def turn_of(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


def text_kind(path: str) -> str:
    return "input_text" if path == RESPONSES else "text"


def text_of(path: str, answer: dict[str, Any]) -> Any:
    """What is said."""
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == MESSAGES:
        return answer["content"]
    return [item["content"][0]["text"] for item in answer["output"]]


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name, 0) for name in names)


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"my_gateway_tag": "blue"}, "my_gateway_tag"),
    (CHAT, {"use_beam_search": True, "best_of": 3}, "use_beam_search, best_of"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0"),
    (CHAT, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    (CHAT, {"k\nX-Evil: 1": 1, "\u00e4": 2}, "k?X-Evil:?1, \\xe4"),
    (TEXT, {"mirostat": 2, "cache_prompt": True}, "mirostat, cache_prompt"),
    (
        RESPONSES,
        {"client_metadata": {"a": "b"}, "truncation": "auto"},
        "client_metadata, truncation",
    ),
    (
        RESPONSES,
        {"tools": [{"type": "web_search"}, {"type": "custom", "name": "x"}]},
        "tools.0, tools.1",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": "a"}, {"type": "web_search_call", "id": "w"}]},
        "input.1",
    ),
    (
        RESPONSES,
        {"include": ["a", "message.output_text.logprobs", "b"], "service_tier": "priority"},
        "include.0, include.2, service_tier",
    ),
    (
        RESPONSES,
        {"reasoning": {"effort": "most", "summary": "long"}, "text": {"verbosity": "none"}},
        "reasoning.effort, reasoning.summary, text.verbosity",
    ),
    (CHAT, {"reasoning_effort": "", "verbosity": "none"}, "reasoning_effort, verbosity"),
    (RESPONSES, {"background": True}, "background"),
    (MESSAGES, {"context_management": {"edits": []}}, "context_management"),
    (
        MESSAGES,
        {
            "system": [
                {
                    "type": "text",
                    "text": "a",
                    "cache_control": {"type": "ephemeral", "scope": "global"},
                }
            ]
        },
        "system.0.cache_control.scope",
    ),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    (
        MESSAGES,
        {
            "tools": [
                {"name": "f", "input_schema": {}, "defer_loading": True, "input_examples": [{}]}
            ]
        },
        "tools.0.defer_loading, tools.0.input_examples",
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                {"role": "user", "content": "b"},
            ]
        },
        "messages.1.content.0",
    ),
    ("/tokenize", {"prompt": "a", "mirostat": 2}, "mirostat"),
    *(
        (
            path,
            {"tools": [{"type": "web_search", "name": "w"}], "tool_choice": choice},
            "tools.0",
        )
        for path, choice in ((CHAT, "auto"), (RESPONSES, "auto"), (MESSAGES, {"type": "auto"}))
    ),
    (CHAT, {"": 1, " a ": 2}, "?, ?a?"),
]


@pytest.fixture(scope="module")
def strict(served: Served) -> Iterator[Served]:
    settings = served.llm.settings.model_copy(update={"strict": True})
    with serving(served.llm, settings, closes=False) as running:
        yield running


def test_what_is_not_known_is_left_out_and_named(
    served: Served, strict: Served, subtests: pytest.Subtests
) -> None:
    for path, fields, named in UNKNOWN:
        with subtests.test(path, fields=fields):
            body = LEAST.get(path, {}) | fields
            answer = served.post(path, body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ignored-fields"] == named
            refused = strict.post(path, body)
            assert refused.status_code == 400
            assert "strict" in refused.text
            assert strict.post(path, LEAST.get(path, {"prompt": "a"})).status_code == 200


def test_streams_name_what_is_left_out(served: Served) -> None:
    answer = served.post(CHAT, LEAST[CHAT] | {"stream": True, "my_gateway_tag": 1})
    assert answer.headers["x-ignored-fields"] == "my_gateway_tag"


def test_kvlinkers_own_fields_are_checked(served: Served) -> None:
    answer = served.post(CHAT, LEAST[CHAT] | {"link": {"polcy": "full"}})
    assert answer.status_code == 400
    assert "Did you mean 'policy'?" in answer.text


def test_no_answer_is_longer_than_what_fits_where_there_is_no_limit(served: Served) -> None:
    fields = {"max_tokens": -1, "stop": [" ", "e", "a", "\n"]}
    assert ask(served, **fields)["choices"]


BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=17f3;"}


def test_the_line_that_accounts_for_a_request_is_no_part_of_the_prompt(served: Served) -> None:
    system = [{"type": "text", "text": "Be brief."}]
    plain = served.post(MESSAGES, LEAST[MESSAGES] | {"system": system}).json()
    billed = served.post(MESSAGES, LEAST[MESSAGES] | {"system": [BILLING, *system]}).json()
    assert prompt_tokens(billed) == prompt_tokens(plain)


def test_models_are_described_as_anthropic_does_where_it_is_spoken(served: Served) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = served.http.get("/v1/models?limit=1000", headers=headers).json()
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", MODEL_NAME, MODEL_NAME)
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (
        False,
        MODEL_NAME,
        MODEL_NAME,
    )
    assert served.http.get(f"/v1/models/{MODEL_NAME}", headers=headers).json() == model
    with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
        assert [each.id for each in client.models.list()] == [MODEL_NAME]


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(served: Served) -> None:
    window = served.llm.max_model_len
    for text in ("word " * window, "word " * 40 * window):
        messages = [{"role": "user", "content": text}]
        answer = served.post(MESSAGES, {"messages": messages, "max_tokens": 4})
        said = re.match(
            r"prompt is too long: (\d+) tokens > (\d+) maximum", answer.json()["error"]["message"]
        )
        assert said is not None
        assert int(said[1]) > int(said[2]) == window
    other = served.post(CHAT, {"messages": [{"role": "user", "content": "word " * window}]})
    assert not other.json()["error"]["message"].startswith("prompt is too long")


FUNCTION = {"type": "function", "name": "list_files", "parameters": {"type": "object"}}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "tools": [FUNCTION | {"name": "spawn"}, {"type": "web_search"}],
}


def test_functions_of_a_namespace_are_called(served: Served) -> None:
    """And the call has the namespace, as clients tell functions apart by it."""
    body = LEAST[RESPONSES] | {"max_output_tokens": 200, "tools": [FUNCTION, SPACE]}
    for name, space in (("spawn", "agents"), ("list_files", None)):
        choice = {"type": "function", "name": name}
        answer = served.post(RESPONSES, body | {"tool_choice": choice})
        assert answer.headers["x-ignored-fields"] == "tools.1.tools.1"
        (call,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
        assert (call["name"], call.get("namespace")) == (name, space)


ALLOWED = {"mode": "required", "tools": [{"type": "function", "name": "spawn"}]}


def test_of_allowed_tools_one_is_called(served: Served) -> None:
    body = LEAST[RESPONSES] | {"max_output_tokens": 200, "tools": [FUNCTION, SPACE]}
    answer = served.post(RESPONSES, body | {"tool_choice": {"type": "allowed_tools", **ALLOWED}})
    calls = [item for item in answer.json()["output"] if item["type"] == "function_call"]
    assert {call["name"] for call in calls} == {"spawn"}
    functions = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("a", "b")
    ]
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "b"}}],
        },
    }
    fields = {"tools": functions, "tool_choice": choice, "max_tokens": 200}
    (said,) = ask(served, **fields)["choices"]
    assert {call["function"]["name"] for call in said["message"]["tool_calls"]} == {"b"}
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "c"}}]  # type: ignore[index]
    assert "'c' is allowed" in served.post(CHAT, LEAST[CHAT] | fields).text


def test_calls_of_custom_tools_stand_in_histories(served: Served) -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** a"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    custom = ask(served, RESPONSES, input=[{"role": "user", "content": "a"}, call, result])
    function = {
        "type": "function_call",
        "call_id": "c1",
        "name": "apply_patch",
        "arguments": '{"input": "*** a"}',
    }
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    plain = ask(served, RESPONSES, input=[{"role": "user", "content": "a"}, function, output])
    assert prompt_tokens(custom) == prompt_tokens(plain)


def test_a_schema_may_have_its_older_name(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    body = LEAST[MESSAGES] | {"max_tokens": 100}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        text = served.post(MESSAGES, body | fields).json()["content"][0]["text"]
        assert re.sub(r"\s", "", text) == '{"a":1}'
