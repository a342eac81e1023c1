"""Grammars of tool calls and of reasoning take what they should, and nothing else."""

from __future__ import annotations

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.engines.embedded.decoding.grammars import GrammarGuides
from kvlinker.prompting.answer_forms.form import AnswerForm
from tests.doors.http.serving import tiny_model
from tests.prompting.test_answer_forms import ONE_CALL, TAILS, TEMPLATES, TIME, TWO_CALLS

WEATHER = {
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_have_the_models_own_form(guides, name):
    one = way(name).calls_grammar(TOOLS, tail=TAILS[name], several=False)
    several = way(name).calls_grammar(TOOLS, tail=TAILS[name], several=True)
    assert takes(guides, one, ONE_CALL[name])
    assert takes(guides, several, ONE_CALL[name])
    if name in TWO_CALLS:
        assert takes(guides, several, TWO_CALLS[name])
        assert not takes(guides, one, TWO_CALLS[name])
    for wrong in (
        "Hello",
        ONE_CALL[name].replace("get_weather", "get_news"),
        ONE_CALL[name].replace("2", "9"),
    ):
        assert not takes(guides, several, wrong)
    only_time = way(name).calls_grammar([TIME], tail=TAILS[name], several=True)
    assert not takes(guides, only_time, ONE_CALL[name])


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_free_until_a_call_begins(guides, name):
    free = way(name).free_grammar(TOOLS, tail=TAILS[name], several=True)
    assert takes(guides, free, "Hello <b>you</b>, [1].")
    assert takes(guides, free, "")
    assert takes(guides, free, ONE_CALL[name])
    assert not takes(guides, free, ONE_CALL[name].replace("get_weather", "get_news"))
    assert not takes(guides, free, ONE_CALL[name].replace("2", "9"))
    if name != "llama3":
        assert takes(guides, free, f"Let me see. {ONE_CALL[name]}")
        assert not takes(guides, free, f"Let me see. {ONE_CALL[name]}".replace("2", "9"))


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
    assert over is grammar


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
