"""Answers that follow a grammar are valid, whatever the model would say."""

import json
import re
import threading
from decimal import Decimal
from typing import Literal

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from kvlinker.base.errors import EngineClosedError, InvalidRequestError, KVLinkerError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.embedded.decoding import grammars
from kvlinker.engines.embedded.decoding.grammars import (
    COMPILED_LIMIT,
    GrammarGuide,
    GrammarGuides,
)
from kvlinker.linking import parse_policy
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.engines.embedded.conftest import Outcome, linked_prompt
from tests.schemas import SCHEMAS, UNENFORCEABLE, check
from tests.toy_models import loaded_model

TOKENS = byte_tokenizer().get_vocab()
CLOSING = {TOKENS[character]: 3.0 for character in '"}],0123456789'}
"""A little more weight on what ends strings, lists and objects: random weights seldom do."""

SAMPLING = {
    "temperature": 1,
    "ignore_eos": False,
    "logit_bias": CLOSING,
    "logprobs": None,
    "max_tokens": 300,
}


def exactly(text):
    """Parse JSON with all digits of its numbers: 1.9999999999999999999 is less than 2."""
    return json.loads(text, parse_float=Decimal)


def valid_answers(made, count):
    """Ask for ``count`` answers under the schemas in turn; return how many came to their end, all
    of them valid."""
    names = [list(SCHEMAS)[number % len(SCHEMAS)] for number in range(count)]
    prompts = [linked_prompt(20, seed=number) for number in range(len(SCHEMAS))]
    ended = 0
    for first in range(0, count, 64):
        submitted = [
            (
                name,
                made.submit(
                    prompts[number % len(prompts)],
                    "naive",
                    seed=first + number,
                    grammar=AnswerGrammar.json_schema(SCHEMAS[name]),
                    **SAMPLING,
                )[0],
            )
            for number, name in enumerate(names[first : first + 64])
        ]
        for name, outcome in submitted:
            outcome.wait()
            assert outcome.finished is not None, (name, outcome.failed)
            if outcome.finished.reason == "stop":
                ended += 1
                check(exactly(json.dumps(SCHEMAS[name])), exactly(outcome.text))
    return ended


def test_there_are_enough_schemas():
    assert len(SCHEMAS) >= 30


@pytest.mark.whole
def test_answers_are_valid_under_every_schema(bench):
    assert valid_answers(bench(kv_slots=32_768), len(SCHEMAS) * 2) > len(SCHEMAS)


@pytest.mark.whole
def test_a_thousand_answers_are_valid(bench):
    assert valid_answers(bench(kv_slots=32_768), 1000) > 600


def test_what_cannot_be_enforced_is_refused_with_the_cause(bench, subtests):
    made = bench()
    for name, (schema, cause) in UNENFORCEABLE.items():
        with subtests.test(name):
            grammar = AnswerGrammar.json_schema(schema, param="response_format")
            with pytest.raises(InvalidRequestError, match=re.escape(cause)) as caught:
                made.answer(linked_prompt(20), grammar=grammar)
            assert caught.value.param == "response_format"


NO_GRAMMARS: list[tuple[Literal["json", "regex", "grammar"], str, str]] = [
    ("json", "{", "line 1 column 2"),
    ("json", "[1]", "object"),
    ("regex", "(", "unclosed"),
    ("regex", r"(?!a)b", "look-ahead"),
    ("grammar", "start: missing", "missing"),
    ("grammar", "what is this?", "grammar"),
    ("regex", "a" * 8193, "8,193 characters"),
    ("grammar", "start: " + "a" * 32_768, "32,775 characters"),
    ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(500)), "501 rules"),
    (
        "grammar",
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(500)),
        "501 rules",
    ),
    ("json", json.dumps({"properties": {f"p{i}": {} for i in range(4000)}}), "8,002 fields"),
    ("json", json.dumps({"enum": list(range(8000))}), "8,001 fields"),
    (
        "json",
        json.dumps({"$defs": {f"d{i}": {"$ref": "#"} for i in range(501)}}),
        "501 references",
    ),
    (
        "json",
        json.dumps({"anyOf": [{"pattern": "a?" * 2500}, {"pattern": "b?" * 2500}]}),
        "10,000 characters of p",
    ),
]


def test_what_is_no_grammar_is_refused(bench, subtests):
    made = bench()
    for kind, source, cause in NO_GRAMMARS:
        with subtests.test(kind, cause=cause), pytest.raises(InvalidRequestError, match=cause):
            made.answer(linked_prompt(20), grammar=AnswerGrammar(kind, source))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (AnswerGrammar("regex", r"[a-f]{3,5}-(x|yy)"), r"[a-f]{3,5}-(x|yy)"),
        (
            AnswerGrammar.choice(["yes", "no", 'a "quoted"\n one', "\U0001f600"]),
            'yes|no|a "quoted"\n one|\U0001f600',
        ),
        (AnswerGrammar.choice(["a", "ab", "abc"]), "a|ab|abc"),
        (AnswerGrammar("grammar", 'start: "<" WORD ">"\nWORD: /[xyz]{1,4}/'), "<[xyz]{1,4}>"),
        (AnswerGrammar("grammar", 'root ::= "a" digit digit\ndigit ::= [0-9]'), "a[0-9]{2}"),
    ],
    ids=["regex", "choice", "choices that begin alike", "Lark", "GBNF"],
)
def test_other_notations(bench, grammar, pattern):
    made = bench()
    outcomes, _ = made.submit_choices(
        linked_prompt(20), 6, policy="naive", seed=3, grammar=grammar, **SAMPLING
    )
    for outcome in outcomes:
        assert re.fullmatch(pattern, outcome.wait().text), outcome.text
        assert outcome.finished.reason == "stop"


def test_the_end_of_the_grammar_is_the_end_of_the_answer(bench):
    """Whatever the request says of endings, and greedily, too."""
    made = bench()
    for options in ({"ignore_eos": True}, {"min_tokens": 50, "max_tokens": 60}, {"temperature": 0}):
        outcome = made.answer(
            linked_prompt(20), grammar=AnswerGrammar.choice(["abc"]), **(SAMPLING | options)
        )
        assert (outcome.text, outcome.finished.reason) == ("abc", "stop")


def test_an_answer_that_is_cut_tells_so(bench):
    outcome = bench().answer(
        linked_prompt(20),
        grammar=AnswerGrammar("regex", "[ab]{20}"),
        **SAMPLING | {"max_tokens": 9},
    )
    assert outcome.finished.reason == "length"
    assert re.fullmatch("[ab]{9}", outcome.text)


def test_what_a_request_forbids_may_leave_nothing(bench):
    refused = Outcome()
    sampling = SamplingParams(grammar=AnswerGrammar("regex", "a+b"))
    request = GenerationRequest(
        linked_prompt(20), parse_policy("naive"), sampling, bad_words=((TOKENS["a"],),)
    )
    bench().engine.generate(request, refused.put)
    error = refused.wait().failed.error
    assert "No token is left" in error.message
    assert error.status == 400


@pytest.mark.whole
def test_answers_go_on_after_they_gave_their_slots_up(bench):
    """The guide of a preempted answer knows where it was."""
    made = bench(kv_slots=400, max_step_tokens=64)
    grammar = AnswerGrammar("regex", "([a-d]{2},){40}end")
    prompts = [linked_prompt(fresh=30, seed=seed) for seed in range(6)]
    with made.held():
        submitted = [
            made.submit(prompt, seed=1, grammar=grammar, **SAMPLING | {"max_tokens": 150})[0]
            for prompt in prompts
        ]
    for outcome in submitted:
        assert re.fullmatch("([a-d]{2},){40}end", outcome.wait().text)
    assert made.engine.scheduler.preemptions > 0


def test_masks_are_computed_beside_the_engines_thread(bench, monkeypatch):
    seen = set()
    mask = GrammarGuide._mask

    def noting(guide):
        seen.add(threading.current_thread().name)
        return mask(guide)

    monkeypatch.setattr(GrammarGuide, "_mask", noting)
    bench().answer(linked_prompt(20), grammar=AnswerGrammar("regex", "[ab]{5}"), **SAMPLING)
    assert {name.partition("_")[0] for name in seen} == {"kvlinker-grammar"}


def test_a_grammar_is_compiled_once_and_a_closed_engine_takes_none():
    guides = GrammarGuides(loaded_model("llama"))
    grammar = AnswerGrammar("regex", "[ab]{5}")
    guides.prepare(grammar)
    compiled = guides._compiled[grammar]
    for number in range(2 * COMPILED_LIMIT):
        guides.prepare(AnswerGrammar("regex", "b" * number))
        make = guides.prepare(grammar)
    assert guides._compiled[grammar] is compiled
    assert len(guides._compiled) == COMPILED_LIMIT
    guides.close()
    with pytest.raises(EngineClosedError):
        make()


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        (
            "json",
            '{"$ref": "#"}',
            "This JSON schema cannot be enforced: no finite value is valid, since a required part"
            " needs itself",
        ),
        ("regex", "[a&&b]", "This regular expression cannot be followed: no text satisfies it."),
        ("grammar", 'start: start "a"', "This grammar cannot be followed: no text satisfies it."),
        (
            "json",
            json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(500)}}),
            "This JSON schema cannot be followed: it never ends or is too large. Ask for a simpler"
            " form.",
        ),
    ],
    ids=["endless schema", "empty regex", "endless rule", "wide schema"],
)
def test_who_fails_later_is_told_what_the_matter_is(kind, source, told):
    guides = GrammarGuides(loaded_model("llama"))
    grammar = AnswerGrammar(kind, source, param="response_format")
    with pytest.raises(InvalidRequestError) as caught:
        follow_at_random(guides.prepare(grammar)(), np.random.default_rng(0))
    guides.close()
    assert caught.value.message == told
    assert caught.value.param == "response_format"


def test_a_first_mask_is_computed_by_the_thread_that_brings_the_grammar(monkeypatch):
    """It can take seconds, for which the masks of others would wait."""
    guides = GrammarGuides(loaded_model("llama"))
    limits = LLParserLimits(max_lexer_states=2)
    monkeypatch.setattr(
        grammars, "LLMatcher", lambda *args, **options: LLMatcher(*args, **options, limits=limits)
    )
    guides.close()  # from here on, the thread of masks takes nothing
    with pytest.raises(InvalidRequestError, match="too many states to follow"):
        guides.prepare(AnswerGrammar("regex", "(.|\n)*[aeiou].{30}"))


def test_a_grammar_whose_lexer_is_exhausted_is_compiled_anew(monkeypatch):
    """Copies of a matcher share a lexer, and each text makes it another few states."""
    guides = GrammarGuides(loaded_model("llama"))
    grammar = AnswerGrammar("regex", "(.|\n)*[aeiou].{30}")
    limits = LLParserLimits(max_lexer_states=400)
    monkeypatch.setattr(
        grammars, "LLMatcher", lambda *args, **options: LLMatcher(*args, **options, limits=limits)
    )
    random = np.random.default_rng(0)
    with pytest.raises(InvalidRequestError, match="too many states"):
        follow_at_random(guides.prepare(grammar)(), random)
    guide = guides.prepare(grammar)()
    for _ in range(2):
        guide.accept(first_allowed(guide))
    assert guide.allowed() is not None
    guides.close()


def follow_at_random(guide, random):
    """Let an answer take one token after the other, any of those allowed."""
    while (allowed := guide.allowed()) is not None:
        guide.accept(int(random.choice(np.flatnonzero(allowed))))


def first_allowed(guide):
    allowed = guide.allowed()
    assert allowed is not None
    return int(allowed.argmax())


def test_masks_wait_for_the_next_step_or_for_who_needs_one():
    guides = GrammarGuides(loaded_model("llama"))
    first, other = (guides.prepare(AnswerGrammar("regex", "[ab]{2}"))() for _ in range(2))
    for guide in (first, other):
        guide.accept(first_allowed(guide))
        assert not guide._next.done()
    guides.start()
    assert other._next.result() is not None
    first.accept(first_allowed(first))
    assert first.allowed() is None  # nobody has started it
    other.accept(first_allowed(other))
    guides.close()
    with pytest.raises(EngineClosedError):
        guides.start()


def test_a_mask_that_panics_leaves_the_others():
    guides = GrammarGuides(loaded_model("llama"))

    def panics():
        raise KeyboardInterrupt  # as a panic in Rust, no Exception

    first, other = guides.postpone(panics), guides.postpone(lambda: None)
    guides.start()
    with pytest.raises(KeyboardInterrupt):
        first.result(10)
    assert other.result(10) is None
    guides.close()


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidRequestError("too complex"), "too complex"),
        (Panic("index out of bounds"), "could not be followed: Panic: index out of bounds"),
    ],
)
def test_a_grammar_that_cannot_be_followed_fails_its_answer_alone(monkeypatch, error, told):
    guides = GrammarGuides(loaded_model("llama"))
    first, other = (guides.prepare(AnswerGrammar("regex", "[ab]{2}"))() for _ in range(2))
    tokens = [first_allowed(guide) for guide in (first, other)]

    def fails():
        raise error

    monkeypatch.setattr(first, "_mask", fails)
    for guide, token in zip((first, other), tokens, strict=True):
        guide.accept(token)
    guides.start()
    with pytest.raises(KVLinkerError, match=told):
        first.allowed()
    assert other.allowed() is not None
    guides.close()
