"""The example's tools in the turns of an agent: a call, its result of context caches, and an answer
that links them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelRequest,
    ModelResponse,
    wrap_model_call,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool

from langchain_kvlinker import ChatKVLinker, KVLinkerRetriever, context_blocks

EXAMPLE = Path(__file__).parents[2] / "examples" / "langchain_agent.py"
QUESTION = HumanMessage("Where does Tom Reyes live?")


@pytest.fixture
def tools(base_url: str) -> list[BaseTool]:
    """The tools of the example's agent."""
    found: list[BaseTool] = runpy.run_path(str(EXAMPLE))["TOOLS"]
    return found


def test_what_a_tool_finds_is_linked_into_the_answer(
    tools: list[BaseTool], facts: tuple[str, ...]
) -> None:
    """The toy in the box is made to call, and knows no question to ask: the result is that of the
    user's."""
    model = ChatKVLinker(temperature=0, max_tokens=64)
    calling = model.bind_tools(tools, tool_choice="find_notes").invoke([QUESTION])
    assert isinstance(calling, AIMessage)
    (call,) = calling.tool_calls
    assert call["name"] == "find_notes"
    assert isinstance(call["args"]["query"], str)

    result: Any = tools[0].invoke({**call, "args": {"query": QUESTION.content}})
    assert isinstance(result, ToolMessage)
    found = [block["context_cache"] for block in result.content if isinstance(block, dict)]
    assert facts[1] in found
    assert set(found) <= set(facts)

    answer = model.bind_tools(tools).invoke([QUESTION, calling, result])
    assert [cache["id"] for cache in answer.response_metadata["link"]["context_caches"]] == found


@tool
def read_notes(person: Literal["Tom Reyes", "Mira Holt"]) -> list[str | dict[Any, Any]]:
    """Read the notes about a person."""
    return context_blocks(KVLinkerRetriever(k=3, filter={"source": "facts"}).invoke(person))


@tool
def tell_time(zone: Literal["UTC", "CET"]) -> str:
    """Tell the time."""
    return f"12:00 {zone}"


def each_once(tools: list[BaseTool]) -> AgentMiddleware:
    """Have the toy in the box call one tool after the other, which it does not of its own accord,
    and then answer."""

    @wrap_model_call
    def choose(
        request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
    ) -> ModelResponse:
        called = [message.name for message in request.messages if isinstance(message, ToolMessage)]
        left = [each.name for each in tools if each.name not in called]
        if not left:
            return handler(request.override(tool_choice="none"))
        return handler(request.override(tool_choice=left[0]))

    return choose


@pytest.mark.usefixtures("facts")
def test_an_agent_with_two_tools_answers(base_url: str) -> None:
    model = ChatKVLinker(temperature=0, max_tokens=64)
    tools = [tell_time, read_notes]
    agent = create_agent(model, tools, middleware=[each_once(tools)], name="clerk")
    told = agent.invoke({"messages": [QUESTION]})["messages"]
    calls = [
        call for message in told if isinstance(message, AIMessage) for call in message.tool_calls
    ]
    assert [call["name"] for call in calls] == ["tell_time", "read_notes"]
    results = [message for message in told if isinstance(message, ToolMessage)]
    assert [message.tool_call_id for message in results] == [call["id"] for call in calls]
    assert results[0].content == f"12:00 {calls[0]['args']['zone']}"
    assert {message.name for message in told if isinstance(message, AIMessage)} == {"clerk"}
    answer = told[-1]
    assert answer.text.strip()
    linked = [cache["id"] for cache in answer.response_metadata["link"]["context_caches"]]
    assert linked == [
        block["context_cache"] for block in results[1].content if isinstance(block, dict)
    ]
