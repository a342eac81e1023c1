"""Definitions of tools become chunks where they are marked, at every route that takes tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import (
    MODEL_NAME,
    TEMPLATE,
    Served,
    serving,
    tiny_model,
    tiny_settings,
)

CHAT = "/v1/chat/completions"
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]
TEMPLATE_WITH_TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n'"
    " }}</tools>{% endif %}" + TEMPLATE
)


def function(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": (
            f"Tells the {name}: " + " ".join(f"{name}{number:03d}" for number in range(40))
        ),
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Varna"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }


def tool(name: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": function(name), **(MARK if mark is None else mark)}


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template shows tools."""
    settings = tiny_settings(tmp_path_factory.mktemp("state"), chat_template=TEMPLATE_WITH_TOOLS)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


@pytest.fixture(params=["templated", "served"])
def either(request: pytest.FixtureRequest) -> Any:
    """A server whose chat template shows tools, and one on which kvlinker's own section does."""
    return request.getfixturevalue(request.param)


def ask(served: Served, *tools: Any, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": QUESTION,
        "tools": list(tools),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = served.post(CHAT, body | fields)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def linked(answer: dict[str, Any], what: str) -> list[Any]:
    return [cache[what] for cache in answer["link"]["context_caches"]]


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def text_of(served: Served, body: dict[str, Any]) -> str:
    text: str = served.llm.tokenizer.decode(served.post("/tokenize", body).json()["tokens"])
    return text


def test_marked_definitions_are_found_in_any_order_and_company(either: Served) -> None:
    a, b, plain = tool("wind"), tool("rain", BREAKPOINT), tool("sun", {})
    first = ask(either, a, plain, b)
    second = ask(either, b, a, plain)
    assert (linked(first, "created"), linked(second, "created")) == ([True, True], [False, False])
    assert linked(second, "id") == linked(first, "id")[::-1]
    assert cached(first) == 0
    assert cached(second) > sum(linked(second, "tokens")) - 20
    for cache_id, name in zip(linked(first, "id"), ("wind", "rain"), strict=True):
        shown = json.loads(either.get(f"/v1/context_caches/{cache_id}/content").json()["text"])
        assert shown in (function(name), {"type": "function", "function": function(name)})
    body = {"messages": QUESTION, "tools": [a, plain, b]}
    unmarked = {"messages": QUESTION, "tools": [tool("wind", {}), plain, tool("rain", {})]}
    assert text_of(either, body) == text_of(either, unmarked)


def test_prompts_are_counted_and_explained_with_their_chunks(templated: Served) -> None:
    body = {"messages": QUESTION, "tools": [tool("snow"), tool("fog", {})]}
    asked = ask(templated, *body["tools"])
    assert templated.post("/tokenize", body).json()["count"] == asked["usage"]["prompt_tokens"]
    explained = templated.post("/v1/link/explain", body).json()
    (segment,) = (each for each in explained["segments"] if each["type"] == "chunk")
    assert ([segment["context_cache"]], [segment["tokens"]]) == (
        linked(asked, "id"),
        linked(asked, "tokens"),
    )


def test_calls_of_marked_tools_are_valid(templated: Served) -> None:
    called = ask(
        templated, tool("hail"), tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Varna")
    assert linked(called, "created") == [True]
    assert "link" not in ask(templated, tool("hail"), tool_choice="none")
    assert "link" not in ask(templated, tool("hail"), link={"implicit": "off"})
    assert "link" not in ask(templated, tool("hail"), link={"policy": "full"})


def test_what_is_not_there_just_once_is_computed(templated: Served) -> None:
    quoted = json.dumps({"type": "function", "function": function("dew")})
    asked = ask(
        templated,
        tool("dew"),
        tool("mist"),
        messages=[{"role": "user", "content": f"What is {quoted}?"}],
    )
    (tokens,) = linked(asked, "tokens")
    shown = json.dumps({"type": "function", "function": function("mist")})
    assert tokens == templated.post("/tokenize", {"text": shown}).json()["count"]


def test_definitions_are_recognised(templated: Served) -> None:
    """In another order; and at once where they are known."""
    auto = {"link": {"implicit": "auto"}}
    a, b, known = tool("storm", {}), tool("gale", {}), tool("breeze")
    assert "link" not in ask(templated, a, b, **auto)
    assert "link" not in ask(templated, a, b, **auto), (
        "what begins alike is reused as it was computed"
    )
    assert linked(ask(templated, b, a, **auto), "created") == [True, True]
    marked = ask(templated, known)
    assert linked(ask(templated, tool("breeze", {}), **auto), "id") == linked(marked, "id")


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "cache_control.ttl"),
        ({"prompt_cache_breakpoint": {"mode": "auto"}}, "prompt_cache_breakpoint.mode"),
    ],
)
def test_marks_of_other_forms_are_refused(
    templated: Served, mark: dict[str, Any], param: str
) -> None:
    refused = templated.post(CHAT, {"messages": QUESTION, "tools": [tool("f", mark)]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"tools.0.{param}")


def test_anthropics_client_marks_tools(templated: Served) -> None:
    described = function("frost")
    marked: Any = {
        "name": "frost",
        "description": described["description"],
        "input_schema": described["parameters"],
    }
    fields: Any = {"model": MODEL_NAME, "messages": QUESTION, "tools": [marked | MARK]}
    with anthropic.Anthropic(base_url=templated.url, api_key="none", max_retries=0) as client:
        first, second = (client.messages.create(max_tokens=1, **fields).usage for _ in range(2))
        counted = client.messages.count_tokens(**fields).input_tokens
    assert (
        first.cache_creation_input_tokens
        == ask(templated, tool("frost"))["link"]["context_caches"][0]["tokens"]
    )
    assert (first.cache_read_input_tokens, second.cache_creation_input_tokens) == (0, 0)
    assert second.cache_read_input_tokens > 100
    assert counted == first.input_tokens + first.cache_creation_input_tokens


def test_responses_take_marked_tools(templated: Served) -> None:
    marked: Any = {"type": "function", "strict": None, **function("thaw"), **MARK}
    with openai.OpenAI(base_url=f"{templated.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {
            "model": MODEL_NAME,
            "input": "Weather?",
            "tools": [marked],
            "max_output_tokens": 1,
        }
        first, second = (client.responses.create(**fields).usage for _ in range(2))
    assert first is not None
    assert second is not None
    assert (
        first.input_tokens_details.cached_tokens,
        second.input_tokens_details.cached_tokens > 100,
    ) == (0, True)
