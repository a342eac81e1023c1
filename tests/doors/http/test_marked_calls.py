"""Calls that special tokens mark, as in Mistral's models, pass through engine, grammar and
reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

TEMPLATE = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in"
    " messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls"
    " %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{{ eos_token"
    " }}{% elif m.role == 'tool' %}[RESULT]{{ m.content }}{% else %}{{ m.content }}{{ eos_token"
    " }}{% endif %}{% endfor %}"
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def marking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tiny_settings(tmp_path_factory.mktemp("state"), chat_template=TEMPLATE)
    model = tiny_model(marks=("[INST]", "[/INST]", "[TOOL_CALLS]"))
    with serving(LLM.from_model(model, settings), settings) as running:
        yield running


def test_the_mark_is_seen(marking: Served) -> None:
    mark = marking.llm.tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert mark in marking.llm.answer_form.shown_tokens


def test_required_calls(marking: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "Time?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "n": 8,
    }
    choices = marking.post("/v1/chat/completions", body | {"seed": 1, "max_tokens": 120}).json()[
        "choices"
    ]
    ended = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert ended
    for choice in ended:
        assert choice["message"]["content"] is None
        assert all(
            json.loads(call["function"]["arguments"])["zone"] in ("CET", "UTC")
            for call in choice["message"]["tool_calls"]
        )


def test_text_has_no_special_tokens(marking: Served) -> None:
    """Neither where tools are offered nor where they are not, though random weights say some."""
    llm = marking.llm
    others = {
        str(llm.tokenizer.convert_tokens_to_ids(name)): 9
        for name in ("[/INST]", "<s>", "<|start|>")
    }
    body = {
        "messages": [{"role": "user", "content": "Time?"}],
        "logit_bias": others,
        "max_tokens": 20,
        "seed": 1,
    }
    for tools in ([], [TOOL]):
        answer = marking.post("/v1/chat/completions", body | {"tools": tools, "n": 4}).json()
        for choice in answer["choices"]:
            text = choice["message"]["content"] or ""
            assert not any(mark in text for mark in ("[/INST]", "<s>", "<|start|>"))
