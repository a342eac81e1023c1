"""Libraries for agents, as they come from their packages, call a tool and go on with its result."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import anthropic
import httpx
import openai
import pytest
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from tests.redis_server import free_port
from tests.waiting import wait_until

import agents

from .conftest import CLIENTS, START_SECONDS, Agent, Server

QUESTION = "What is the first word of notes.txt?"
NOTES = "Zebra crossing."
PROXY_KEY = f"sk-{secrets.token_hex(16)}"
"""LiteLLM's proxy does not start without a key of its own that is hard to guess."""


@pytest.mark.parametrize("provider", ["openai", "openai-compatible", "anthropic"])
def test_ai_sdk(agent: Agent, server: Server, provider: str) -> None:
    """Its program is read from the standard input, so that its imports are found in the folder
    that it runs in."""
    program = Path(__file__).with_name("ai_sdk.mjs").read_text()
    there = Agent(agent.home, CLIENTS)
    printed = there.run(
        *("node", "--input-type=module", "-", provider, f"{server.url}/v1"), stdin=program
    )
    done = json.loads(printed.splitlines()[-1])
    assert set(done["read"]) == {"notes.txt"}
    assert done["steps"][0] == "tool-calls"
    assert len(done["steps"]) == 2


class State(TypedDict):
    """The state of LangGraph's agent."""

    messages: Annotated[list[AnyMessage], add_messages]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langgraph(server: Server, responses: bool) -> None:
    """The agent must call in its first turn, and must not in the second."""

    @tool
    def read_file(path: Literal["notes.txt"]) -> str:
        """Read a file."""
        return NOTES

    model = ChatOpenAI(
        model="default",
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_tokens=64,  # type: ignore[call-arg]
        use_responses_api=responses,
    )

    def answer(state: State) -> dict[str, Any]:
        called = isinstance(state["messages"][-1], ToolMessage)
        bound = model.bind_tools([read_file], tool_choice="none" if called else "any")
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(State)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([read_file]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    said = graph.compile().invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 10})[
        "messages"
    ]
    results = [each for each in said if isinstance(each, ToolMessage)]
    assert results
    assert {each.content for each in results} == {NOTES}


@pytest.mark.parametrize("api", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
def test_openai_agents(server: Server, api: Any) -> None:
    """The SDK asks for a call in the first turn alone."""
    read = []

    @agents.function_tool
    def read_file(path: Literal["notes.txt"]) -> str:
        """Read a file."""
        read.append(path)
        return NOTES

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            agent = agents.Agent[None](
                "reader",
                model=api("default", openai_client=client),
                tools=[read_file],
                model_settings=agents.ModelSettings(tool_choice="required", max_tokens=64),
            )
            untraced = agents.RunConfig(tracing_disabled=True)
            with suppress(agents.MaxTurnsExceeded):  # a small model may call again and again
                await agents.Runner.run(agent, QUESTION, max_turns=3, run_config=untraced)

    asyncio.run(run())
    assert set(read) == {"notes.txt"}
    assert len(server.requests()) >= 2


@pytest.fixture(scope="module")
def litellm_proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of LiteLLM's proxy before the server."""
    program = CLIENTS / "bin" / "litellm"
    if not program.exists():
        pytest.skip("litellm is not there: `make test-agents` installs it")
    folder = tmp_path_factory.mktemp("litellm")
    parameters = {"model": "openai/default", "api_base": f"{server.url}/v1", "api_key": "none"}
    models = [{"model_name": "default", "litellm_params": parameters}]
    config = {"model_list": models, "general_settings": {"master_key": PROXY_KEY}}
    (folder / "config.yaml").write_text(json.dumps(config))
    port = free_port()
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [str(program), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env={"HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health/liveliness").is_success
        return False

    try:
        wait_until(is_up, seconds=START_SECONDS)
        yield url
    finally:
        running.terminate()
        running.wait()


SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["notes.txt"]}},
    "required": ["path"],
    "additionalProperties": False,
}


def test_litellm_passes_chats_on(litellm_proxy: str) -> None:
    function = {"name": "read_file", "description": "Reads a file.", "parameters": SCHEMA}
    asked: dict[str, Any] = {
        "model": "default",
        "max_tokens": 64,
        "tools": [{"type": "function", "function": function}],
    }
    turn = {"role": "user", "content": QUESTION}
    with openai.OpenAI(base_url=f"{litellm_proxy}/v1", api_key=PROXY_KEY) as client:
        calling = client.chat.completions.create(
            messages=[turn], tool_choice="required", **asked
        ).choices[0]
        call = calling.message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"path": "notes.txt"}
        result = {"role": "tool", "tool_call_id": call.id, "content": NOTES}
        history = [turn, calling.message.model_dump(exclude_none=True), result]
        streamed = client.chat.completions.create(messages=history, stream=True, **asked)
        assert [chunk.choices[0].finish_reason for chunk in streamed if chunk.choices][-1]


def test_litellm_translates_anthropics_messages(litellm_proxy: str) -> None:
    asked: dict[str, Any] = {
        "model": "default",
        "max_tokens": 64,
        "tools": [{"name": "read_file", "description": "Reads a file.", "input_schema": SCHEMA}],
    }
    turn = {"role": "user", "content": QUESTION}
    with anthropic.Anthropic(base_url=litellm_proxy, api_key=PROXY_KEY) as client:
        calling = client.messages.create(messages=[turn], tool_choice={"type": "any"}, **asked)
        call = calling.content[-1]
        assert call.type == "tool_use"
        assert call.input == {"path": "notes.txt"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": NOTES}
        said = [each.model_dump(exclude_none=True) for each in calling.content]
        history = [
            turn,
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result]},
        ]
        assert client.messages.create(messages=history, **asked).stop_reason
