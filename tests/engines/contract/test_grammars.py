"""One notation for all grammars: it takes the texts that the others take."""

import time
from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.limits import MOST_EMPTY_LINES, MOST_GRAMMAR_CHARACTERS
from kvlinker.engines.contract.grammars import as_lark, check_enforceable
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.schemas import SCHEMAS, UNENFORCEABLE

FRAME = 'start: "<" (call | @answer) ">"\ncall: "call @answer"\n'


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_tokenizer()
    return made, LLTokenizer(made.backend_tokenizer.to_str())


def takes(tokenizer, grammar, text):
    """Whether the text is a whole answer under the grammar."""
    made, native = tokenizer
    matcher = LLMatcher(native, LLMatcher.grammar_from_lark(as_lark(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = made(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES = {
    "schema": (
        AnswerGrammar.json_schema(SCHEMAS["closed object"]),
        ['{"name": "a", "age": 3}'],
        ['{"name": "a"}', ""],
    ),
    "regex": (AnswerGrammar("regex", r"[a-f]+/\d\/(?i)x"), ["ab/1/X", "f/9/x"], ["ab/1", "1"]),
    "regex of lines": (AnswerGrammar("regex", "a\n\\\nb"), ["a\n\nb"], ["a\\n\\\nb"]),
    "regex of nothing": (AnswerGrammar("regex", ""), [""], ["a"]),
    "choice": (
        AnswerGrammar.choice(["a/b", 'q"\n', "\U0001f600"]),
        ["a/b", 'q"\n', "\U0001f600"],
        ["a", "b"],
    ),
    "Lark": (
        AnswerGrammar("grammar", 'start: "{" WORD "}"\nWORD: /[x{]{1,4}/'),
        ["{x}", "{{}"],
        ["{}"],
    ),
    "GBNF": (AnswerGrammar("grammar", 'root ::= "a" digit\ndigit ::= [0-9]'), ["a1"], ["a"]),
}


def test_every_notation_alone_and_in_a_frame(tokenizer, subtests):
    for name, (grammar, taken, refused) in CASES.items():
        with subtests.test(name):
            framed = AnswerGrammar(grammar.kind, grammar.source, frame=FRAME)
            for text in taken:
                assert takes(tokenizer, grammar, text)
                assert takes(tokenizer, framed, f"<{text}>")
                assert not takes(tokenizer, framed, text)
            for text in refused:
                assert not takes(tokenizer, grammar, text)
                assert not takes(tokenizer, framed, f"<{text}>")
            assert takes(tokenizer, framed, "<call @answer>")


def test_every_schema_can_be_written(tokenizer, subtests):
    for name, schema in SCHEMAS.items():
        with subtests.test(name):
            lark = as_lark(AnswerGrammar.json_schema(schema))
            assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark), tokenizer[1])


def test_what_cannot_be_enforced_is_still_refused(tokenizer, subtests):
    for name, (schema, cause) in UNENFORCEABLE.items():
        with subtests.test(name):
            grammar = AnswerGrammar.json_schema(schema)
            if "minProperties" in cause:
                with pytest.raises(InvalidRequestError, match="minProperties"):
                    check_enforceable(grammar)
            else:
                assert LLMatcher.validate_grammar(
                    LLMatcher.grammar_from_lark(as_lark(grammar)), tokenizer[1]
                )


LEAST = '{"type": "object", "minProperties": 2}'


@pytest.mark.parametrize(
    "grammar",
    [
        AnswerGrammar("json", '{"minProperties": 2.0}'),
        AnswerGrammar("lark", f'start: "<" arguments ">"\narguments: %json {LEAST}\n', "tools"),
        AnswerGrammar(
            "regex", "a", frame=f"start: @answer | arguments\narguments: %json {LEAST}\n"
        ),
        AnswerGrammar("grammar", f"start: %json{LEAST}"),
    ],
    ids=["as a float", "in a call", "in a call beside a form", "in a grammar"],
)
def test_several_properties_are_refused_wherever_a_schema_stands(grammar):
    with pytest.raises(InvalidRequestError, match="minProperties") as refused:
        check_enforceable(grammar)
    assert refused.value.param == grammar.param
    single = replace(
        grammar, source=grammar.source.replace("2", "1"), frame=grammar.frame.replace("2", "1")
    )
    check_enforceable(single)


def test_nested_too_deeply():
    deep = '{"items": ' * 9000 + "{}" + "}" * 9000
    with pytest.raises(InvalidRequestError, match="deep"):
        check_enforceable(AnswerGrammar("json", deep))


@pytest.mark.parametrize("line", ["\n", " \t\r\n"])
@pytest.mark.parametrize("text", ['start: "a"\n', 'root ::= "a"\n'])
def test_grammars_of_empty_lines_are_refused(line, text):
    """The compiler, which keeps Python's lock, would take half a minute."""
    check_enforceable(AnswerGrammar("grammar", text + line * MOST_EMPTY_LINES))
    with pytest.raises(InvalidRequestError, match="501 empty lines; at most 500"):
        check_enforceable(AnswerGrammar("grammar", text + line * (MOST_EMPTY_LINES + 1)))


def test_any_grammar_is_checked_in_a_moment(subtests):
    for piece in ("\n", "a", " ", "a \n", "-", "%json ", "\r", "a-"):
        with subtests.test(piece=piece):
            source = piece * (MOST_GRAMMAR_CHARACTERS // len(piece))
            began = time.process_time()
            try:
                check_enforceable(AnswerGrammar("grammar", source))
            except InvalidRequestError:
                assert piece == "\n"
            assert time.process_time() - began < 1
