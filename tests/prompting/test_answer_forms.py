"""Answers of every known way of writing are read alike, however they are cut into pieces."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.answers import AnswerParts
from kvlinker.prompting.answer_forms import answer_forms, form_for
from kvlinker.prompting.answer_forms.calls import CallForm
from kvlinker.prompting.answer_forms.form import AnswerForm
from kvlinker.prompting.answer_forms.reader import ID_LENGTH, LONGEST_HEAD
from kvlinker.prompting.answer_forms.template_reader import TemplateReader
from tests.toy_tokenizers import byte_level

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
ROME = '{"city": "R\u00f6m \\"x\\"", "days": 2}'

TEMPLATES = {
    "qwen3": "<|im_start|> <tool_call> <think>",
    "smollm3": "<|im_start|> xml_tools <think>",
    "llama3": "<|start_header_id|> tool_calls",
    "mistral": "[INST] [TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS] [ARGS] [THINK]",
    "gemma3": "<start_of_turn> <end_of_turn>",
    "other": "{{ messages }} <think>",
}
TAILS = {
    "qwen3": "<|im_start|>assistant\n",
    "smollm3": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "Hi [/INST]",
    "mistral_args": "Hi [/INST]",
    "gemma3": "<start_of_turn>model\n",
    "other": "[user] Hi [assistant] ",
}
NOW = '{"name": "get_time", "arguments": {}}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
ONE_CALL = {
    "qwen3": HERMES,
    "smollm3": HERMES,
    "gemma3": HERMES,
    "other": HERMES,
    "llama3": f'{{"name": "get_weather", "parameters": {ROME}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}]',
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{ROME}",
}
TWO_CALLS = {
    **dict.fromkeys(("qwen3", "other"), f"{HERMES}\n<tool_call>\n{NOW}\n</tool_call>"),
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}, {NOW}]',
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]get_time[ARGS]{{}}",
}
REASONING = {"qwen3", "smollm3", "mistral_args", "other"}


def way(name: str) -> AnswerForm:
    return AnswerForm.of(byte_level(), TEMPLATES[name])


def read(
    name: str,
    text: str,
    *,
    tools: Any = TOOLS,
    tail: str | None = None,
    size: int = 1,
    cut: bool = False,
) -> tuple[str, str, list[Any]]:
    """Content, reasoning and calls of an answer that comes in pieces of ``size`` characters."""
    said = parts(name, text, tools=tools, tail=tail, size=size, cut=cut)
    assert all(len(call.id) == ID_LENGTH and call.id.isalnum() for call in said.calls)
    assert len({call.id for call in said.calls}) == len(said.calls)
    told = [(call.name, json.loads(call.arguments)) for call in said.calls]
    assert said.calls_complete == bool(told)
    return said.content, said.reasoning, told


def parts(
    name: str,
    text: str,
    *,
    tools: Any = TOOLS,
    tail: str | None = None,
    size: int = 1,
    cut: bool = False,
    only_calls: bool = False,
) -> AnswerParts:
    tail = TAILS[name] if tail is None else tail
    reader = way(name).reader(tail, tools, only_calls=only_calls)
    pieces = [
        piece
        for start in range(0, len(text), size)
        for piece in reader.feed(text[start : start + size])
    ]
    return AnswerParts.of([*pieces, *reader.finish(cut=cut)])


def test_every_way_is_found_by_its_template() -> None:
    assert TEMPLATES.keys() == answer_forms().keys()
    for name, template in TEMPLATES.items():
        assert form_for(template) is answer_forms()[name]


SIZES = [1, 3, 10_000]
sizes = pytest.mark.parametrize("size", SIZES)
every_way = pytest.mark.parametrize("name", TEMPLATES)


def test_text_is_text(subtests: pytest.Subtests) -> None:
    text = " Hello <b>you</b> [1] {x}\n\n"
    for name, size in product(TEMPLATES, SIZES):
        with subtests.test(name, size=size):
            assert read(name, text, size=size) == (text, "", [])


def test_a_call_is_told(subtests: pytest.Subtests) -> None:
    expected = [("get_weather", json.loads(ROME))]
    for name, size in product(TEMPLATES, SIZES):
        with subtests.test(name, size=size):
            assert read(name, ONE_CALL[name], size=size) == ("", "", expected)


def test_calls_in_parallel_are_told(subtests: pytest.Subtests) -> None:
    expected = [("get_weather", json.loads(ROME)), ("get_time", {})]
    for name, size in product(TWO_CALLS, SIZES):
        with subtests.test(name, size=size):
            assert read(name, TWO_CALLS[name], size=size) == ("", "", expected)


def test_text_before_a_call_is_told_apart(subtests: pytest.Subtests) -> None:
    for name, size in product(sorted(TEMPLATES.keys() - {"llama3"}), SIZES):
        with subtests.test(name, size=size):
            content, _, calls = read(name, f"Let me see. {ONE_CALL[name]}", size=size)
            assert (content.rstrip(), len(calls)) == ("Let me see.", 1)


def test_reasoning_is_told_apart(subtests: pytest.Subtests) -> None:
    for name, size in product(sorted(REASONING), SIZES):
        with subtests.test(name, size=size):
            reasoning = way(name).reasoning
            assert reasoning is not None
            opening, closing = reasoning
            assert read(name, f"{opening}\nSo <b>?\n{closing}\n\nYes.\n", size=size) == (
                "Yes.\n",
                "So <b>?",
                [],
            )
            assert read(name, f"{opening}\nSo?\n{closing}\n\n{ONE_CALL[name]}", size=size)[1:] == (
                "So?",
                [("get_weather", json.loads(ROME))],
            )
            assert read(name, f"{opening}\nSo? And", size=size) == ("", "So? And", [])


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "other"])
def test_reasoning_that_the_prompt_begins_goes_on(name: str) -> None:
    assert read(name, "hm\n</think>\n\nYes", tail=TAILS[name] + "<think>\n") == ("Yes", "hm", [])


@pytest.mark.parametrize("name", ["qwen3", "smollm3"])
def test_reasoning_that_the_prompt_ends_is_over(name: str) -> None:
    assert read(name, "Yes", tail=TAILS[name] + "<think>\n\n</think>\n\n") == ("Yes", "", [])


def test_without_tools_nothing_is_a_call(subtests: pytest.Subtests) -> None:
    for name, size in product(TEMPLATES, SIZES):
        with subtests.test(name, size=size):
            assert read(name, ONE_CALL[name], tools=(), size=size) == (ONE_CALL[name], "", [])


NO_CALLS = [
    ("qwen3", "hi <tool_call>\nnot json\n</tool_call> after <tool_call"),
    ("qwen3", "<tool_call>\n5\n</tool_call>"),
    ("qwen3", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("qwen3", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("llama3", '{"a": 5}'),
    ("llama3", " {not JSON"),
    ("mistral", "[TOOL_CALLS] nonsense"),
    ("mistral", 'See [TOOL_CALLS] [{"x": 1}]'),
    ("mistral_args", "x [TOOL_CALLS]f[ARGS]{}"),
    ("mistral_args", "x [TOOL_CALLS]get_ti[ARGS]{}"),
]


def test_what_is_no_call_is_shown_as_it_is(subtests: pytest.Subtests) -> None:
    for (name, text), size in product(NO_CALLS, SIZES):
        with subtests.test(name, text=text, size=size):
            assert read(name, text, size=size) == (text, "", [])


def test_a_call_that_the_prompt_begins_and_that_is_none_is_shown_without_it() -> None:
    tail = f'{TAILS["qwen3"]}<tool_call>\n{{"name": "f'
    assert read("qwen3", "oo</tool_call> more", tail=tail) == ("oo</tool_call> more", "", [])
    wrong = f"{TAILS['qwen3']}<tool_call>nonsense</tool_call>\n"
    assert read("qwen3", f"so {HERMES}", tail=wrong)[0] == "so"


@sizes
def test_pieces_are_in_order(size: int) -> None:
    reader = way("qwen3").reader(TAILS["qwen3"], TOOLS)
    text = f"See.{HERMES}\nThen<tool_call>\n{NOW}\n</tool_call>"
    pieces = [
        piece
        for start in range(0, len(text), size)
        for piece in reader.feed(text[start : start + size])
    ]
    pieces += reader.finish(cut=False)
    told = {"call": "+", "arguments": "", "called": "."}
    assert "".join(told.get(piece.kind, piece.text) for piece in pieces) == "See.+.Then+."


def test_a_call_comes_as_it_is_written(subtests: pytest.Subtests) -> None:
    """The name as soon as it is complete, and each character of the arguments at once."""
    for name in TEMPLATES:
        with subtests.test(name):
            reader = way(name).reader(TAILS[name], TOOLS)
            call = ONE_CALL[name]
            if name == "llama3":  # any JSON might begin as a call does, up to the arguments
                named = call.index('"parameters": ') + len('"parameters": ')
            else:
                named = call.index("get_weather") + len("get_weather") + 1
            assert not reader.feed(call[: named - 1])
            (begun,) = reader.feed(call[named - 1 : named])
            assert (begun.kind, begun.text) == ("call", "get_weather")
            reader.feed(call[named : call.index(ROME)])
            for character in ROME:
                assert reader.feed(character)[0].text == character


@every_way
@given(data=st.data())
def test_a_call_that_is_cut_is_never_text(name: str, data: st.DataObject) -> None:
    """Wherever the answer is cut, and whatever it has before the call."""
    before = "" if name == "llama3" else data.draw(st.sampled_from(["", "See.\n", "a < [b] "]))
    whole = before + data.draw(
        st.sampled_from([ONE_CALL[name], TWO_CALLS.get(name, ONE_CALL[name])])
    )
    text = whole[: data.draw(st.integers(0, len(whole)))]
    size = data.draw(st.integers(1, len(text) + 1))
    said = parts(name, text, size=size, cut=True)
    assert before.startswith(said.content)
    names = ["get_weather", "get_time"]
    assert [call.name for call in said.calls] == names[: len(said.calls)]
    for call, arguments in zip(said.calls, (ROME, "{}"), strict=False):
        assert arguments.startswith(call.arguments)
        complete = call.arguments == arguments
        assert complete or (call is said.calls[-1] and not said.calls_complete)
    if not before:
        forced = parts(name, text, size=size, cut=True, only_calls=True)
        assert forced.content == ""
        assert [(call.name, call.arguments) for call in forced.calls] == [
            (call.name, call.arguments) for call in said.calls
        ]


@given(cut=st.integers(0, 40), size=st.integers(1, 9))
def test_what_is_cut_before_a_name_is_neither_call_nor_text(cut: int, size: int) -> None:
    text = "Hm. " + HERMES[: min(cut, HERMES.index("get_weather") + len("get_weather"))]
    said = parts("qwen3", text, size=size, cut=True)
    assert (said.content.rstrip(), said.calls) == ("Hm.", ())


def test_space_before_a_cut_is_text() -> None:
    assert parts("qwen3", "See \n", cut=True).content == "See \n"


@sizes
def test_what_stands_before_a_call_that_is_none_is_told_apart(size: int) -> None:
    """However the answer comes: in pieces or as a whole."""
    text = (
        f"<think>\nSo?\n</think>\n\nSee.{ONE_CALL['qwen3']}<tool_call>{{broken</tool_call> <b>more"
    )
    call = ("get_weather", json.loads(ROME))
    assert read("qwen3", text, size=size) == (
        "See.<tool_call>{broken</tool_call> <b>more",
        "So?",
        [call],
    )


@sizes
def test_marks_within_arguments_are_text(size: int) -> None:
    arguments = {"city": '</tool_call> <tool_call> {"name": "get_time"} }]'}
    call = ONE_CALL["qwen3"].replace(ROME, json.dumps(arguments))
    assert read("qwen3", call, size=size) == ("", "", [("get_weather", arguments)])


@given(
    before=st.text(alphabet=" \nx1", max_size=4),
    body=st.text(alphabet='<>/tool_call{}":,\n[]ax1', max_size=20),
    after=st.text(alphabet='<>/tool_call{}":,\n[]ax1', max_size=20),
    size=st.integers(1, 9),
    name=st.sampled_from(["qwen3", "mistral_args"]),
)
def test_content_and_marks_of_a_call_that_is_none_are_the_text(
    before: str, body: str, after: str, size: int, name: str
) -> None:
    opening, closing = {
        "qwen3": ("<tool_call>", "</tool_call>"),
        "mistral_args": ("[TOOL_CALLS]f[ARGS]", "</s>"),
    }[name]
    text = f"{before}{opening}no{body}{closing}{after}"
    assert read(name, text, size=size) == (text, "", [])


@given(
    text=st.text(alphabet='<>/think tool_call{}":,\n[]ax1', max_size=60),
    size=st.integers(1, 9),
    name=st.sampled_from(sorted(TEMPLATES)),
)
def test_nothing_is_lost_and_nothing_raises(text: str, size: int, name: str) -> None:
    """Of a text without whole marks, every character is told."""
    content, reasoning, calls = read(name, text, size=size)
    if (
        not calls
        and not reasoning
        and "<think>" not in text
        and "<tool_call>" not in text
        and not text.lstrip().startswith("{")
    ):
        assert content == text


RESPONSE_TEMPLATE = {
    "start_anchor": "@",
    "fields": {
        "tool_calls": {
            "open": "!!",
            "close": "!!",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


BARE = f'{{"name": "get_weather", "arguments": {ROME}}}'
INDENTED = json.dumps(json.loads(BARE), indent=2, ensure_ascii=False)


def test_bare_calls_are_told(subtests: pytest.Subtests) -> None:
    one = [("get_weather", json.loads(ROME))]
    cases = {
        BARE: ("", one),
        INDENTED: ("", one),
        f"```json\n{INDENTED}\n```": ("", one),
        f"```\n{BARE}\n```\n": ("", one),
        f"So:\n\n```json\n{BARE}\n```": ("So:", one),
        f"So:\n  {BARE}": ("So:", one),
        f"{BARE}\n{NOW}\n": ("", [*one, ("get_time", {})]),
        f"```json\n{BARE}\n```\n```json\n{NOW}\n```": ("", [*one, ("get_time", {})]),
    }
    for (text, told), size in product(cases.items(), SIZES):
        with subtests.test(text, size=size):
            content, reasoning, calls = read("qwen3", text, size=size)
            assert (content, reasoning, calls) == (told[0], "", told[1])


def test_other_json_is_text(subtests: pytest.Subtests) -> None:
    texts = (
        '{"name": "get_weather", "price": 3}',
        '{"name": "get_weather", "arguments": "none"}',
        '{"name": "get_news", "arguments": {}}',
        '```json\n{"name": "Anna", "arguments": {"age": 3}}\n```',
        '{"arguments": {}, "name": "get_time"}',
        f"It is {BARE}",
        f"[{BARE}]",
        f"```python\n{BARE}\n```".replace("\n{", " {"),
        "```json\n{\n" + " " * LONGEST_HEAD + BARE[1:],
    )
    for text, size, cut in product(texts, SIZES, (False, True)):
        with subtests.test(text[:40], size=size, cut=cut):
            assert read("qwen3", text, size=size, cut=cut) == (text, "", [])


def test_bare_calls_belong_to_templates_that_show_them() -> None:
    calls = form_for(TEMPLATES["qwen3"])["calls"]
    shown = '<|im_start|> tools <tool_call>\\n{\\"name\\": NAME, \\"arguments\\": ARGUMENTS}'
    assert CallForm.of(calls, shown).bare
    assert CallForm.of(calls, "").bare, "kvlinker's own section shows it"
    assert CallForm.of(calls, "tools <tool_call><function=NAME> arguments").bare is None
    assert CallForm.of(form_for(TEMPLATES["mistral_args"])["calls"], "").bare is None


def test_text_is_held_back_only_while_it_may_be_a_bare_call() -> None:
    reader = way("qwen3").reader(TAILS["qwen3"], TOOLS)
    told = [("".join(piece.text for piece in reader.feed(each))) for each in ('{"na', 'me": "A')]
    assert told == ["", '{"name": "A']
    reader = way("qwen3").reader(TAILS["qwen3"], TOOLS)
    pieces = reader.feed('```json\n{"name": "get_weather", "arguments": {"ci')
    assert [(piece.kind, piece.text) for piece in pieces] == [
        ("call", "get_weather"),
        ("arguments", '{"ci'),
    ]


def over(
    name: str, text: str, size: int, *, only_calls: bool = False, most: int | None = None
) -> tuple[list[str], str, bool]:
    """Names of the calls of an answer, what is told apart from them, and whether it is over."""
    reader = way(name).reader(TAILS[name], TOOLS, only_calls=only_calls, most_calls=most)
    pieces: list[Any] = []
    for start in range(0, len(text), size):
        pieces += reader.feed(text[start : start + size])
    said = AnswerParts.of([*pieces, *reader.finish(cut=False)])
    assert said.calls_complete
    return [call.name for call in said.calls], said.content, reader.is_over


def test_a_repeated_call_ends_the_answer(subtests: pytest.Subtests) -> None:
    spaced = HERMES.replace('", "days"', '",\n  "days"')
    other = HERMES.replace('"days": 2', '"days": 3')
    for size, only_calls in product(SIZES, (False, True)):
        with subtests.test(size=size, only_calls=only_calls):
            for again in (HERMES, spaced):
                text = f"{HERMES}\n{other}\n{again}\nMore"
                told = over("qwen3", text, size, only_calls=only_calls)
                assert told == (["get_weather"] * 2, "", True)
            assert over("qwen3", f"{HERMES}\n{other}", size) == (["get_weather"] * 2, "", False)
    for size in SIZES:
        assert over("qwen3", f"{BARE}\n{INDENTED}", size) == (["get_weather"], "", True)
        twice = TWO_CALLS["mistral"].replace(NOW, f"{NOW}, {NOW}, {NOW}")
        assert over("mistral", twice, size) == (["get_weather", "get_time"], "", True)


def test_a_call_that_may_repeat_another_is_held_back() -> None:
    reader = way("qwen3").reader(TAILS["qwen3"], TOOLS)
    reader.feed(HERMES)
    begun = HERMES.partition("2}")[0]
    assert reader.feed(f"\n{begun}") == []
    pieces = reader.feed("3")
    assert [piece.kind for piece in pieces] == ["call", "arguments"]
    assert pieces[1].text == f"{ROME.partition('2')[0]}3"
    assert [piece.text for piece in reader.feed("1")] == ["1"]
    cut = way("qwen3").reader(TAILS["qwen3"], TOOLS)
    said = AnswerParts.of([*cut.feed(f"{HERMES}\n{begun}"), *cut.finish(cut=True)])
    assert [call.arguments for call in said.calls] == [ROME, ROME.partition("2")[0]]


def test_answers_are_over_after_so_many_calls(subtests: pytest.Subtests) -> None:
    for size, most in product(SIZES, (1, 2)):
        with subtests.test(size=size, most=most):
            told = over("qwen3", f"{TWO_CALLS['qwen3']}\n", size, most=most)
            assert told == (["get_weather", "get_time"][:most], "", True)
    assert not over("qwen3", TWO_CALLS["qwen3"], 1, most=3)[2]


def test_a_tokenizers_own_response_template_is_followed() -> None:
    own = byte_level(bos=False)
    own.response_template = RESPONSE_TEMPLATE
    try:
        reader = AnswerForm.of(own, None).reader("@", TOOLS)
        pieces = reader.feed('Hi !!{"name": "get_time", "arguments": {}}!!!!{"name": ')
        pieces += reader.finish(cut=True)
    finally:
        own.response_template = None
    said = AnswerParts.of(pieces)
    assert (said.content, [(call.name, call.arguments) for call in said.calls]) == (
        "Hi ",
        [("get_time", "{}")],
    )


def test_a_response_templates_calls_end_the_answer_too() -> None:
    call = '!!{"name": "get_time", "arguments": {}}!!'
    other = '!!{"name": "get_weather", "arguments": {}}!!'
    reader = TemplateReader(RESPONSE_TEMPLATE, TOOLS, tail="@")
    said = AnswerParts.of(reader.feed(call + other))
    assert len(said.calls) == 2
    assert not reader.is_over
    assert reader.feed(f"{call} so{other}") == reader.finish(cut=False) == []
    assert reader.is_over
    limited = TemplateReader(RESPONSE_TEMPLATE, TOOLS, tail="@", most_calls=1)
    assert len(AnswerParts.of(limited.feed(call + other)).calls) == 1
    assert limited.is_over


def test_a_call_that_is_nested_too_deeply_to_be_read_is_text() -> None:
    deep = '{"a": ' * 100_000 + "1" + "}" * 100_000
    text = f'Hi !!{{"name": "get_time", "arguments": {deep}}}!! there'
    reader = TemplateReader(RESPONSE_TEMPLATE, TOOLS, tail="@")
    said = AnswerParts.of([*reader.feed(text), *reader.finish(cut=False)])
    assert (said.content, said.calls) == (text, ())


def test_special_tokens_of_the_way_are_shown_in_its_answers() -> None:
    tokenizer = byte_level()
    marked = AnswerForm.of(tokenizer, "<|start|> <think>")
    assert marked.shown_tokens == frozenset()
    assert marked.marks == {"<think>": tokenizer.convert_tokens_to_ids("<think>")}
