"""With Qwen's template and real weights, calls of tools are those of the full computation."""

import json

import pytest

from kvlinker import LLM
from tests.real_models.conftest import QWEN, model_path

DEFAULT = None
"""No policy in the request."""

NOTES = (
    "Otto Lund lives in Bergen. He works as a teacher, and his boat lies in the harbour.\n\n",
    "Mira Holt lives in Varna. She works as a baker, and opens at five in the morning.\n\n",
)


def tool(name, description, **parameters):
    """A tool whose arguments are of these types of JSON."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    tool("get_weather", "Get the current weather in a city.", city="string"),
    tool("send_mail", "Send a mail.", to="string", subject="string", text="string"),
    tool("set_timer", "Start a timer.", minutes="integer"),
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    with LLM(model_path(QWEN), weights="bf16", prefix_cache="off", state_dir=state) as opened:
        yield opened


def call_of(llm, caches, question, policy):
    """The name and arguments of the one call in an answer that has no text."""
    answer = llm.chat_completion(
        [{"role": "user", "content": [*caches, question]}],
        tools=TOOLS,
        policy=policy,
        max_tokens=48,
        temperature=0,
    )
    assert answer.finish_reason == "tool_calls"
    assert answer.text == ""
    assert (answer.usage.cached_tokens > 0) == (policy != "full")
    (call,) = answer.tool_calls
    return call.name, json.loads(call.arguments)


@pytest.mark.parametrize(
    ("question", "expected", "policies"),
    [
        (
            "Start a timer of 25 minutes.",
            ("set_timer", {"minutes": 25}),
            ("naive", "legolink-16", "query-15", DEFAULT),
        ),
        (  # naive and query-15 call it for the other note's city
            "What is the weather in the city where Otto Lund lives?",
            ("get_weather", {"city": "Bergen"}),
            ("legolink-16", DEFAULT),
        ),
    ],
)
def test_calls_are_those_of_the_full_computation(llm, question, expected, policies):
    caches = llm.generate_context_cache(NOTES)
    for policy in ("full", *policies):
        assert call_of(llm, caches, question, policy) == expected, policy
