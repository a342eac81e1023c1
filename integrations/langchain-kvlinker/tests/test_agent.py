"""The example's tools in the turns of an agent: a call, its result of context caches, and an answer that links them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool

from langchain_kvlinker import ChatKVLinker

EXAMPLE = Path(__file__).parents[2] / "examples" / "langchain_agent.py"
QUESTION = HumanMessage("Where does Tom Reyes live?")


@pytest.fixture
def tools(base_url: str) -> list[BaseTool]:
    """The tools of the example's agent."""
    found: list[BaseTool] = runpy.run_path(str(EXAMPLE))["TOOLS"]
    return found


def test_what_a_tool_finds_is_linked_into_the_answer(
    tools: list[BaseTool], facts: tuple[str, ...], closing: dict[int, int]
) -> None:
    """The toy in the box is made to call, and knows no question to ask: the result is that of the user's."""
    model = ChatKVLinker(temperature=0, max_tokens=64)
    calling = model.bind_tools(tools, tool_choice="find_notes").invoke([QUESTION], logit_bias=closing)
    assert isinstance(calling, AIMessage)
    (call,) = calling.tool_calls
    assert call["name"] == "find_notes"
    assert isinstance(call["args"]["query"], str)

    result: Any = tools[0].invoke({**call, "args": {"query": QUESTION.content}})
    assert isinstance(result, ToolMessage)
    found = [block["id"] for block in result.content if isinstance(block, dict)]
    assert facts[1] in found
    assert set(found) <= set(facts)

    answer = model.bind_tools(tools).invoke([QUESTION, calling, result])
    assert [cache["id"] for cache in answer.response_metadata["link"]["context_caches"]] == found
