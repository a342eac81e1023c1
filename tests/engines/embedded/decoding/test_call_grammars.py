"""Grammars of tool calls and of reasoning take what they should, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.engines.embedded.decoding.grammars import GrammarGuides
from kvlinker.prompting.answer_forms.form import AnswerForm
from tests.doors.http.serving import tiny_model
from tests.prompting.test_answer_forms import (
    BARE,
    INDENTED,
    NOW,
    ONE_CALL,
    TAILS,
    TEMPLATES,
    TIME,
    TWO_CALLS,
)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "maximum": 7},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TOOLS = [WEATHER, TIME]


@pytest.fixture(scope="module")
def guides():
    made = GrammarGuides(tiny_model())
    yield made
    made.close()


def takes(guides: GrammarGuides, grammar: AnswerGrammar, text: str) -> bool:
    """Return whether the whole of ``text`` follows the grammar to its end."""
    matcher = guides._compile(grammar)
    tokens = tiny_model().tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def way(name: str) -> AnswerForm:
    return AnswerForm.of(tiny_model().tokenizer, TEMPLATES[name])


def free_grammar(name: str, tools: Any = TOOLS, *, tail: str | None = None) -> AnswerGrammar:
    tail = TAILS[name] if tail is None else tail
    grammar = way(name).free_grammar(tools, tail=tail, several=True)
    assert grammar is not None
    return grammar


def test_calls_have_the_models_own_form(guides, subtests):
    for name in TEMPLATES:
        with subtests.test(name):
            one = way(name).calls_grammar(TOOLS, tail=TAILS[name], several=False)
            several = way(name).calls_grammar(TOOLS, tail=TAILS[name], several=True)
            assert takes(guides, one, ONE_CALL[name])
            assert takes(guides, several, ONE_CALL[name])
            if name in TWO_CALLS:
                assert takes(guides, several, TWO_CALLS[name])
                assert not takes(guides, one, TWO_CALLS[name])
            assert takes(guides, several, ONE_CALL[name] + "\n"), "models end with white space"
            assert not takes(guides, several, ONE_CALL[name] + " " * 9)
            for wrong in (
                "Hello",
                ONE_CALL[name].replace("get_weather", "get_news"),
                ONE_CALL[name].replace("2", "9"),
            ):
                assert not takes(guides, several, wrong)
            only_time = way(name).calls_grammar([TIME], tail=TAILS[name], several=True)
            assert not takes(guides, only_time, ONE_CALL[name])


def test_functions_without_properties_have_no_arguments(guides, subtests):
    declared: list[Any] = [None, {}, {"properties": {}}, {"type": "object", "properties": {}}]
    open_ones = [{"type": "object"}, {"properties": {}, "additionalProperties": True}]
    said = ONE_CALL["qwen3"].replace("get_weather", "get_time")
    for parameters in (*declared, *open_ones):
        with subtests.test(parameters):
            function = {"name": "get_time"} | (
                {} if parameters is None else {"parameters": parameters}
            )
            tools = [{"type": "function", "function": function}]
            grammar = way("qwen3").calls_grammar(tools, tail=TAILS["qwen3"], several=False)
            assert takes(guides, grammar, said) is (parameters in open_ones)
            assert takes(guides, grammar, re.sub(r'"arguments": {.*?}', '"arguments": {}', said))


def test_text_is_free_until_a_call_begins(guides, subtests):
    for name in TEMPLATES:
        with subtests.test(name):
            strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
            free = free_grammar(name, [strict, TIME])
            assert takes(guides, free, "Hello <b>you</b>, [1].")
            assert takes(guides, free, "")
            assert takes(guides, free, ONE_CALL[name])
            assert not takes(guides, free, ONE_CALL[name].replace("get_weather", "get_news"))
            assert not takes(guides, free, ONE_CALL[name].replace("2", "9"))
            if name != "llama3":
                assert takes(guides, free, f"Let me see. {ONE_CALL[name]}")
                assert not takes(guides, free, f"Let me see. {ONE_CALL[name]}".replace("2", "9"))


def test_bare_calls_follow_the_schema_too(guides, subtests):
    free = free_grammar("qwen3")
    fenced = f"```json\n{INDENTED}\n```"
    now = f"```json\n{NOW}\n```"
    for call in (BARE, INDENTED, fenced, f"So:\n\n{fenced}"):
        with subtests.test(call):
            assert takes(guides, free, call)
            assert takes(guides, free, f"{call}\n")
            assert takes(guides, free, f"{call}\n{now}\n")
            assert not takes(guides, free, call.replace("2", "9"))
            assert not takes(guides, free, call.replace('"days"', '"hours"'))
            assert not takes(guides, free, f"{call} And so on")
    one = way("qwen3").free_grammar(TOOLS, tail=TAILS["qwen3"], several=False)
    assert one is not None
    assert takes(guides, one, fenced)
    assert not takes(guides, one, f"{fenced}\n{now}")
    for text in ('{"name": "get_weather", "price": 9}', '```json\n{"name": "get_news"}\n```\nSo.'):
        assert takes(guides, free, text)
    formal = way("qwen3").without_bare_calls().free_grammar(TOOLS, tail="", several=True)
    assert formal is not None
    assert takes(guides, formal, BARE.replace("2", "9"))


def test_arguments_follow_the_schema_without_strict_too(guides, subtests):
    for name in TEMPLATES:
        with subtests.test(name):
            free = free_grammar(name)
            assert takes(guides, free, ONE_CALL[name])
            assert not takes(guides, free, ONE_CALL[name].replace("2", "9"))
            assert not takes(guides, free, ONE_CALL[name].replace("days", "hours"))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"city": {"type": "string", "pattern": "(?=R)"}}},
        {"properties": {"city": {"$ref": "https://example.com/city"}}},
        {"properties": {"city": False}, "required": ["city"]},
        {"properties": {f"p{index}": {"type": "string"} for index in range(3000)}},
    ],
    ids=["look-ahead", "remote", "impossible", "large"],
)
def test_a_schema_that_cannot_be_followed_refuses_nothing(guides, schema):
    tools = [
        {"type": "function", "function": {"name": "get_news", "parameters": schema}},
        WEATHER,
    ]
    free = free_grammar("qwen3", tools)
    guides.prepare(free)
    news = ONE_CALL["qwen3"].replace("get_weather", "get_news")
    assert takes(guides, free, news)
    assert not takes(guides, free, ONE_CALL["qwen3"].replace("2", "9"))


@pytest.mark.parametrize(
    "part", [{"uniqueItems": True}, {"minProperties": 2}, {"not": {}}, {"format": "own"}]
)
def test_what_a_grammar_cannot_say_is_left_out_of_a_schema(guides, part):
    parameters: dict[str, Any] = {**WEATHER["function"]["parameters"], **part}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    free = free_grammar("qwen3", [tool])
    guides.prepare(free)
    assert takes(guides, free, ONE_CALL["qwen3"])
    assert not takes(guides, free, ONE_CALL["qwen3"].replace("2", "9"))
    strict = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": parameters, "strict": True},
    }
    if "format" not in part:
        with pytest.raises(InvalidRequestError):
            guides.prepare(free_grammar("qwen3", [strict]))


def test_a_mark_binds_as_a_token_and_spelled():
    """Also where other tokens that are no text stand before it."""
    model = tiny_model(marks=("<tool_call>", "</tool_call>", "<|x|>"))
    form = AnswerForm.of(model.tokenizer, TEMPLATES["qwen3"])
    assert "<tool_call>" in form.marks
    free = form.free_grammar(TOOLS, tail=TAILS["qwen3"], several=True)
    assert free is not None
    made = GrammarGuides(model)
    matcher = made._compile(free)
    spelled = {
        mark: [
            token
            for character in mark
            for token in model.tokenizer.encode(character, add_special_tokens=False)
        ]
        for mark in ("<tool_call>", "</tool_call>")
    }

    def tokens(text: str, *, spells: bool) -> list[int]:
        before, mark, rest = text.partition("<tool_call>")
        opening = spelled[mark] if spells and mark else model.tokenizer.encode(mark)[1:]
        first = model.tokenizer.encode(before, add_special_tokens=False)
        return [*first, *opening, *model.tokenizer.encode(rest, add_special_tokens=False)]

    for spells in (False, True):
        for before in ("", "See.", "<|x|>So <|x|>", "a<|x|>"):
            good = tokens(f"{before}{ONE_CALL['qwen3']}", spells=spells)
            assert matcher.deep_copy().try_consume_tokens(good) == len(good)
            wrong = ONE_CALL["qwen3"].replace("get_weather", "get_news")
            bad = tokens(f"{before}{wrong}", spells=spells)
            assert matcher.deep_copy().try_consume_tokens(bad) < len(bad)
    made.close()


@pytest.mark.parametrize("name", ["qwen3", "other"])
def test_a_call_within_reasoning_binds_nothing(guides, name):
    free = free_grammar(name)
    assert takes(guides, free, "<think>\nA <tool_call>?\n</think>\n\nSee.")
    assert takes(guides, free, f"<think>\nA <tool_call>?\n</think>\n\n{ONE_CALL[name]}")
    wrong = ONE_CALL[name].replace("get_weather", "get_news")
    assert not takes(guides, free, f"<think>\nSo\n</think>\n\n{wrong}")
    begun = free_grammar(name, tail=TAILS[name] + "<think>\n")
    assert takes(guides, begun, "So <tool_call>\n</think>\n\nSee.")


@pytest.mark.parametrize(
    "grammar",
    [
        AnswerGrammar.choice(["yes", "no"]),
        AnswerGrammar("regex", "yes|no"),
        AnswerGrammar("grammar", 'start: "yes" | "no"'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_reasoning_may_come_before_a_form(guides, grammar):
    framed = way("qwen3").framed(grammar, tail=TAILS["qwen3"])
    for text in ("yes", "<think>\nso <b>\n</think>\n\nno"):
        assert takes(guides, framed, text)
    for text in ("maybe", "<think>yes", "<think>so</think>maybe", "so</think>yes"):
        assert not takes(guides, framed, text)
    begun = way("qwen3").framed(grammar, tail=TAILS["qwen3"] + "<think>\n")
    assert takes(guides, begun, "so\n</think>\n\nyes")
    assert not takes(guides, begun, "yes")
    over = way("qwen3").framed(grammar, tail=TAILS["qwen3"] + "<think>\n\n</think>\n\n")
    assert over == grammar


def test_a_call_may_take_the_place_of_a_form(guides):
    framed = way("llama3").framed(
        AnswerGrammar.json_schema({"type": "integer"}), tail=TAILS["llama3"], tools=TOOLS
    )
    assert takes(guides, framed, "17")
    assert takes(guides, framed, ONE_CALL["llama3"])
    assert not takes(guides, framed, "seventeen")


def test_arguments_that_cannot_be_enforced_are_refused(guides):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "not": {}}},
    }
    with pytest.raises(InvalidRequestError, match="not") as caught:
        guides.prepare(way("qwen3").calls_grammar([tool], tail="", several=True))
    assert caught.value.param == "tools"
