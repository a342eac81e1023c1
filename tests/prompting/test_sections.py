"""Chat templates that show tools get them; for others they are described in messages."""

from __future__ import annotations

from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk, GenerationContext
from kvlinker.base.types.messages import ChatMessage, Document, TemplateOptions
from kvlinker.prompting.builder import PromptBuilder
from tests.prompting import templates
from tests.prompting.test_answer_forms import TIME, TOOLS
from tests.toy_tokenizers import byte_level

WITH_TOOLS = (
    "{% if tools %}[{% for t in tools %}{{ t | tojson }};{% endfor %}]{% endif %}{% for m in"
    " messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name"
    " }}({{ c.function.arguments | tojson }}){% endfor %}{{ '#' ~ m.tool_call_id if m.tool_call_id"
    " else '' }}{% endfor %}"
)
CALL = {
    "id": "abc",
    "type": "function",
    "function": {"name": "get_time", "arguments": {"zone": "CET"}},
}
HISTORY: list[ChatMessage] = [
    ChatMessage("user", ("Time?",)),
    ChatMessage("assistant", ("Wait.",), fields={"tool_calls": [CALL, CALL]}),
    ChatMessage("tool", ("12:00",), fields={"tool_call_id": "abc"}),
    ChatMessage("tool", ("13:00",), fields={"tool_call_id": "abc"}),
]


def builder(template: str) -> PromptBuilder:
    return PromptBuilder(byte_level(), context=GenerationContext.ALONE, chat_template=template)


def text(template: str, messages: Any, *tools: Any) -> str:
    prompt = builder(template).chat(messages, options=TemplateOptions(tools=tools))
    return byte_level().decode(prompt.tokens.tolist())


def test_templates_that_show_tools_are_given_them() -> None:
    shown = text(WITH_TOOLS, HISTORY, TIME)
    assert (
        shown == '[{"type": "function", "function": {"name":'
        ' "get_time"}};]<user>Time?<assistant>Wait.get_time({"zone": "CET"})get_time({"zone":'
        ' "CET"})<tool>12:00#abc<tool>13:00#abc'
    )


def test_a_template_that_calls_them_otherwise_is_given_them_too() -> None:
    older = WITH_TOOLS.replace("tools", "xml_tools")
    assert text(older, HISTORY, TIME) == text(WITH_TOOLS, HISTORY, TIME)


def test_others_show_calls_and_results_as_text() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
    assert (
        text(templates.CHATML, HISTORY)
        == f"<|start|>user\nTime?<|end|>\n<|start|>assistant\nWait.\n{call}\n{call}<|end|>\n"
        "<|start|>user\n<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response><|end|>\n"
        "<|start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["CHATML", "TRIMMING", "ALTERNATING", "REORDERING"])
def test_others_describe_tools_in_the_first_message(name: str) -> None:
    template = getattr(templates, name)
    shown = text(template, [ChatMessage("user", ("What time is it?",))], *TOOLS)
    for part in (
        '"name": "get_weather"',
        '"description": "The weather of a city."',
        '"name": "get_time"',
        "<tool_call>",
    ):
        assert part in shown
    assert shown.index("get_time") < shown.index("What time is it?")


def test_a_system_message_comes_first() -> None:
    messages: list[ChatMessage] = [
        ChatMessage("system", ("Be brief.",)),
        ChatMessage("user", ("Hi",)),
    ]
    shown = text(templates.CHATML, messages, TIME)
    assert shown.index("Be brief.") < shown.index("get_time") < shown.index("<|start|>user")


def test_tools_need_a_message_to_stand_in() -> None:
    with pytest.raises(InvalidRequestError, match="'system' or 'user'") as caught:
        text(templates.CHATML, [ChatMessage("assistant", ("Hi",))], TIME)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("template", [WITH_TOOLS, templates.CHATML, templates.ALTERNATING])
def test_tools_and_chunks_stand_in_one_prompt(template: str) -> None:
    """Results of tools may be chunks, too."""
    one, two = Chunk((10, 11, 12)), Chunk((20, 21))
    messages: list[ChatMessage] = [
        ChatMessage("user", (one, "Time?")),
        ChatMessage("assistant", (), fields={"tool_calls": [CALL]}),
        ChatMessage("tool", ("It is ", two), fields={"tool_call_id": "abc"}),
    ]
    prompt = builder(template).chat(messages, options=TemplateOptions(tools=(TIME,)))
    assert prompt.chunks == (one, two)


@pytest.mark.parametrize(
    "template",
    [WITH_TOOLS, "{% for d in documents or [] %}<{{ d.text }}>{% endfor %}" + WITH_TOOLS],
)
def test_tools_and_documents_stand_in_one_prompt(template: str) -> None:
    """The documents may be chunks, wherever the template puts them."""
    one, two = Chunk((10, 11, 12)), Chunk((20, 21))
    messages: list[ChatMessage] = [
        ChatMessage("user", ("Time?",)),
        ChatMessage("assistant", (), fields={"tool_calls": [CALL]}),
        ChatMessage("tool", (two,), fields={"tool_call_id": "abc"}),
    ]
    options = TemplateOptions(tools=(TIME,))
    prompt = builder(template).chat(messages, [Document(one), Document("plain")], options=options)
    assert prompt.chunks == (one, two)
    shown = byte_level().decode(prompt.tokens.tolist())
    assert all(
        text in shown
        for text in ("plain", "Time?", '"name": "get_time"', 'get_time({"zone": "CET"})', "#abc")
    )


def test_described_tools_come_before_documents() -> None:
    """They change less often."""
    prompt = builder(templates.CHATML).chat(
        [ChatMessage("user", ("Time?",))],
        [Document("A clock.")],
        options=TemplateOptions(tools=(TIME,)),
    )
    shown = byte_level().decode(prompt.tokens.tolist())
    assert shown.index("get_time") < shown.index("A clock.") < shown.index("Time?")


def test_arguments_cannot_spell_the_word_that_stands_for_a_chunk() -> None:
    """It depends on everything that the template is given."""
    built, chunk = builder(WITH_TOOLS), Chunk((10, 11))
    word = "chunk" + "0" * 32 + "n0z"
    call = {"id": "abc", "type": "function", "function": {"name": word, "arguments": {}}}
    messages = [
        ChatMessage("user", (chunk,)),
        ChatMessage("assistant", ("",), fields={"tool_calls": [call]}),
    ]
    assert built.chat(messages).chunks == (chunk,)


def test_lone_surrogates_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "\ud800"}}
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        text(WITH_TOOLS, [ChatMessage("user", ("Hi",))], tool)
