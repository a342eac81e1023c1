"""What coding agents send is answered, in turns with and without results of tools: their fields,
kinds and lengths, in texts of our own."""

from __future__ import annotations

import json

import pytest

from kvlinker_lab.agent_bodies import AGENTS, OTHER, Request, Session
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served

CALL = '<tool_call>\n{"name": "%s", "arguments": {"path": "notes.md"}}\n</tool_call>'

SIGNS = {
    "/v1/chat/completions": '"tool_calls":[{',
    "/v1/responses": '"type":"function_call"',
    "/v1/messages?beta=true": '"type":"tool_use"',
}
"""What an answer by each API has where the model calls a tool."""


@pytest.fixture
def engine() -> FakeEngine:
    """An engine with room for the longest prompts of agents, in tokens of a byte each."""
    engine = FakeEngine()
    engine.max_model_len = 200_000
    return engine


def test_coding_agents_are_answered(
    faked: Served, engine: FakeEngine, subtests: pytest.Subtests
) -> None:
    for name, make in AGENTS.items():
        lengths = []
        for session in (Session(), Session(turns=3), Session(OTHER, turns=3, edited=1)):
            with subtests.test(name, session=session):
                request = make(session)
                tool = last_tool(request)
                engine.script = [CALL % tool if tool else "Done."]
                answer = faked.post(request.path, request.body)
                assert answer.status_code == 200, answer.text
                named = answer.headers.get("x-ignored-fields", "")
                assert named == ", ".join(request.ignored)
                if tool is not None:
                    assert SIGNS[request.path] in answer.text
                    assert f'"name":"{tool}"' in answer.text
                lengths.append(len(engine.requests[-1].prompt))
        assert lengths[0] + 2000 < lengths[1]  # the results are part of the prompt


def last_tool(request: Request) -> str | None:
    """Return the name of the last function of a request; None for an agent without tools."""
    functions = [tool for tool in request.body.get("tools", ()) if tool.get("type") != "web_search"]
    if not functions:
        return None
    last = functions[-1]
    last = last.get("function", last)
    name: str = (last["tools"][-1] if "tools" in last else last)["name"]
    return name


def test_the_texts_are_the_same_each_time() -> None:
    for make in AGENTS.values():
        first, again = (json.dumps(make(Session(turns=2)).body) for _ in range(2))
        assert first == again
