"""Definitions of tools are found in prompts as templates of every kind write them, and cut out
exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunks import Chunk, GenerationContext
from kvlinker.base.types.messages import ChatMessage, Document, TemplateOptions
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.chat import (
    LONGEST_DEFINITION,
    ChatTemplate,
    repeated_text,
    with_definitions,
)
from tests.prompting import templates
from tests.prompting.test_answer_forms import TIME, WEATHER
from tests.toy_tokenizers import byte_level

NASTY: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": 'Finds "it"\nin a <tool> & more: größer, {{ braces }}, <|end|>.',
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "enum": ["a\\b", "</tools>"]}},
        },
    },
}
TOOLS = (WEATHER, NASTY, TIME)
MESSAGES: list[ChatMessage] = [
    ChatMessage("system", ("Be brief.",)),
    ChatMessage("user", ("Hello",)),
    ChatMessage("assistant", ("Hi.",)),
    ChatMessage("user", ("The weather?",)),
]
ONLY_TOOLS = (
    "{% for m in messages %}{% if loop.last and tools %}%s{% endif %}"
    "{{ m.role + ': ' + m.content }}{% endfor %}"
)
KEY_BY_KEY = (
    '{{ \'{"type": "function", "function": {\' }}{% for key, value in tool.function.items()'
    " %}{% if value is string %}{{ '\"' + key + '\": \"' + value + '\"' }}{% else %}{{ '\"' + key +"
    " '\": ' + value | tojson }}{% endif %}{{ ', ' if not loop.last }}{% endfor %}{{ '}}' }}{{ ', '"
    " if not loop.last else ']' }}"
)
IN_TAGS = (
    "\n<tool>\n<name>{{ tool.function.name }}</name><about>{{ tool.function.description }}</about>"
    "{% for name, what in (tool.function.parameters or {'properties': {}}).properties.items() %}"
    "<{{ name }}>{{ what | tojson }}</{{ name }}>{% endfor %}</tool>"
)
AS_TYPES = "// {{ tool.function.description }}\ntype {{ tool.function.name }} = () => any;\n\n"


def each(tool: str) -> str:
    return "{% for tool in tools %}" + tool + "{% endfor %}"


STYLES = {
    "as Qwen's": (
        "<tools>" + each("{{ '\\n' }}{{ tool | tojson }}") + "{{ '\\n' }}</tools>{{ '\\n\\n' }}"
    ),
    "as Llama's": (
        "No variables.{{ '\\n\\n' }}" + each("{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}")
    ),
    "as Mistral's": "[AVAILABLE_TOOLS] [" + each(KEY_BY_KEY) + "[/AVAILABLE_TOOLS]",
    "as SmolLM3's": "<tools>{{ '\\n' }}" + each("{{ tool | string }}{{ '\\n' }}") + "</tools>",
    "a list": "{{ tools | tojson }}",
    "an indented list": "{{ tools | tojson(indent=2) }}",
    "in tags": "<tools>" + each(IN_TAGS) + "{{ '\\n' }}</tools>",
    "as types": (
        "namespace functions {{ '{\\n\\n' }}" + each(AS_TYPES) + "{{ '}' }} // namespace functions"
    ),
}
STYLED = {name: ONLY_TOOLS.replace("%s", style) for name, style in STYLES.items()}
ALL = STYLED | {"in the message": templates.CHATML}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(byte_level(), source)


def test_long_definitions_are_found_but_not_remembered() -> None:
    rendering = template(STYLED["a list"])
    long: Any = {
        "type": "function",
        "function": {"name": "f", "description": "word " * LONGEST_DEFINITION},
    }
    for tool in (WEATHER, long, long):
        assert json.loads(rendering.definition(tool) or "") == tool
    assert rendering._definition.cache_info().currsize == 1


def test_definitions_are_cut_out_of_any_template(subtests: pytest.Subtests) -> None:
    """Each, in any company and order; all parts together are the prompt as it was."""
    for name, source in ALL.items():
        with subtests.test(name):
            rendering = template(source)
            texts = [rendering.definition(tool) for tool in TOOLS]
            for text, tool in zip(texts, TOOLS, strict=True):
                assert text is not None
                assert tool["function"]["name"] in text
                assert not any(
                    other["function"]["name"] in text for other in TOOLS if other is not tool
                )
            chunks = {
                text: Chunk((number,)) for number, text in enumerate(texts) if text is not None
            }
            for order in ((0, 1, 2), (2, 0), (1,)):
                options = TemplateOptions(tools=tuple(TOOLS[number] for number in order))
                parts = rendering.render(MESSAGES, options=options, definitions=chunks)
                assert [part for part in parts if isinstance(part, Chunk)] == [
                    Chunk((number,)) for number in order
                ]
                back = {chunk: text for text, chunk in chunks.items()}
                (plain,) = rendering.render(MESSAGES, options=options)
                assert (
                    "".join(back[part] if isinstance(part, Chunk) else part for part in parts)
                    == plain
                )


def test_json_is_cut_out_whole() -> None:
    for name in ("as Qwen's", "as Llama's", "a list"):
        text = template(STYLED[name]).definition(NASTY)
        assert text is not None
        assert json.loads(text) == NASTY
    text = template(templates.CHATML).definition(NASTY)
    assert text is not None
    assert json.loads(text) == NASTY["function"], "kvlinker's own section"


@pytest.mark.parametrize(
    "tools",
    [
        "{{ tools[:1] | tojson }}",
        "{{ raise_exception('one only') if tools | length > 1 }}{{ tools | tojson }}",
    ],
)
def test_templates_may_write_no_text_of_its_own(tools: str) -> None:
    rendering = template(ONLY_TOOLS.replace("%s", tools))
    assert rendering.definition(WEATHER) is None
    (shown,) = rendering.render(MESSAGES, options=TemplateOptions(tools=(WEATHER,)))
    assert "get_weather" in str(shown)


def test_a_definition_that_stands_twice_stays_text() -> None:
    rendering = template(STYLED["as Qwen's"])
    text = rendering.definition(TIME)
    assert text is not None
    quoting: list[ChatMessage] = [ChatMessage("user", (f"What is {text}?",))]
    parts = rendering.render(
        quoting, options=TemplateOptions(tools=(TIME,)), definitions={text: Chunk((1,))}
    )
    assert not any(isinstance(part, Chunk) for part in parts)


def test_definitions_and_other_chunks_stand_in_one_prompt() -> None:
    builder = PromptBuilder(
        byte_level(), context=GenerationContext.ALONE, chat_template=STYLED["as Llama's"]
    )
    text = builder.template.definition(WEATHER)
    assert text is not None
    defined, cached, documented = builder.encode_chunk(text), Chunk((10, 11)), Chunk((20, 21))
    messages: list[ChatMessage] = [ChatMessage("user", (cached, "Time?"))]
    options = TemplateOptions(tools=(WEATHER, TIME))
    prompt = builder.chat(
        messages, [Document(documented)], options=options, definitions={text: defined}
    )
    assert prompt.chunks == (defined, documented, cached)


TEXTS = st.text(st.sampled_from("ab{} \n,"), max_size=8)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_what_is_found_stands_in_both(head: str, text: str, gap: str, tail: str) -> None:
    """Whatever stands around it: all that is found occurs in the prompt, and no less than the
    text."""
    once, twice = head + text + tail, head + text + gap + text + tail
    found = repeated_text(once, twice)
    assert found is None or found in once
    assert found is None or twice.count(found) >= 1
    if text.strip() and not gap and not set(text) & {*head, *tail}:
        assert found == text.strip()


@given(
    st.lists(st.text("ab", max_size=6) | st.just(Chunk((9,))), max_size=4),
    st.lists(st.text("ab", min_size=1), max_size=3),
)
def test_cutting_changes_no_text(parts: list[str | Chunk], texts: list[str]) -> None:
    chunks = {text: Chunk((number,)) for number, text in enumerate(dict.fromkeys(texts))}
    back = {chunk: text for text, chunk in chunks.items()}
    cut = with_definitions(parts, chunks)
    assert "".join(
        str(back.get(part, part)) if isinstance(part, Chunk) else part for part in cut
    ) == "".join(map(str, parts))
