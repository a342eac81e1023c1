"""One example under several policies, on a tiny random model."""

import dataclasses
from statistics import fmean
from typing import Any

import pytest

from kvlinker.base.errors import EngineClosedError, InvalidRequestError, KVLinkerError
from kvlinker.base.types.answers import TokenLogprob
from kvlinker.linking import Policy
from kvlinker.llm import LLM
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import ExampleAnswer, Skipped
from kvlinker.service.audit.comparison import NextToken, agree, kl_divergence
from kvlinker.settings import load_settings
from tests.quality.evaluation.conftest import WINDOW, make_example, results_of
from tests.toy_models import loaded_model

POLICIES = ("full", "naive", "legolink-4", "random-50")


def ask(llm, example, **kwargs):
    caches = [llm.generate_context_cache([passage])[0] for passage in example.passages]
    message = {"role": "user", "content": [*caches, example.question]}
    return llm.chat_completion([message], temperature=0, max_tokens=example.max_tokens, **kwargs)


def test_answers_are_those_that_users_get(llm):
    example = make_example(first_line=False)
    results = results_of(Examiner(llm).examine(example, POLICIES), ExampleAnswer)
    assert [result.policy for result in results] == list(POLICIES)
    for result in results:
        answer = ask(llm, example, policy=result.policy)
        assert result.text == answer.text.strip()
        assert (result.cached_tokens, result.recomputed_tokens) == (
            answer.usage.cached_tokens,
            answer.usage.recomputed_tokens,
        )
        assert result.example == example.digest


def test_full_agrees_with_itself_exactly_and_others_less(llm):
    examiner = Examiner(llm)
    results = [
        results_of(examiner.examine(make_example(number), POLICIES), ExampleAnswer)
        for number in range(4)
    ]
    for full, *others in results:
        assert (full.agreement, full.kl, full.recomputed_fraction) == (1, 0, 1)
        assert all(other.kl > 0 for other in others)
        naive, lego, half = others
        assert (
            naive.recomputed_fraction == 0 < lego.recomputed_fraction < half.recomputed_fraction < 1
        )


def test_policies_are_compared_along_fulls_answer(llm):
    """Each token's distribution behind the same tokens, whatever the policy itself would say."""
    for number in range(20):
        recording: Any = _Recording(llm)
        full, naive = results_of(
            Examiner(recording).examine(make_example(number), ("full", "naive")), ExampleAnswer
        )
        if len(recording.answers) == 3:  # else naive has said the same
            break
    expected, own, forced = recording.answers
    assert own.token_ids != expected.token_ids == forced.token_ids
    assert own.logprobs[0].top == forced.logprobs[0].top
    pairs = [
        (NextToken.of(one.top), NextToken.of(other.top))
        for one, other in zip(expected.logprobs, forced.logprobs, strict=True)
    ]
    assert naive.answer_kl == pytest.approx(fmean(kl_divergence(*pair) for pair in pairs))
    assert naive.answer_agreement == fmean(agree(*pair) for pair in pairs)
    assert naive.answer_kl != naive.kl
    assert (full.answer_kl, full.answer_agreement) == (0, 1)


def test_kv_at_later_places_is_there_before_a_policy_is_asked_that_needs_it(llm):
    """It stands behind the passages that come together, else behind the example's own."""
    example, other = make_example(50), make_example(51)
    mixed = [text for pair in zip(example.passages, other.passages, strict=True) for text in pair]
    (apart,) = results_of(Examiner(llm).examine(example, ("row",), mixed), ExampleAnswer)
    assert apart.recomputed_tokens == 0 < apart.answer_kl
    two = make_example(52, passages=make_example(52).passages[:2])  # of which there is one circle
    (own,) = results_of(Examiner(llm).examine(two, ("row",)), ExampleAnswer)
    assert own.recomputed_tokens == 0
    assert own.answer_kl == pytest.approx(0, abs=1e-4)


def test_full_asked_again_is_the_same_to_the_bit(llm):
    examiner = Examiner(llm)
    example = make_example(7)
    assert examiner.examine(example, POLICIES) == examiner.examine(example, POLICIES)
    first, again = (ask(llm, example, policy="full", logprobs=50) for _ in range(2))
    assert first.logprobs == again.logprobs


def test_limits_can_be_replaced_and_short_answers_end_with_their_line(llm):
    for number in range(40):  # many are answered with nothing, or with next to nothing
        example = make_example(number, first_line=False)
        (long,) = results_of(
            Examiner(llm, max_tokens=40).examine(example, ("naive",)), ExampleAnswer
        )
        (short,) = results_of(
            Examiner(llm, max_tokens=3).examine(example, ("naive",)), ExampleAnswer
        )
        assert long.text.startswith(short.text)
        if len(short.text) < len(long.text):
            break
    else:
        pytest.fail("no answer is longer than 3 tokens")
    lines: Any = _Said("  yes, \n no")
    (first_line,) = results_of(Examiner(lines).examine(make_example(), ("full",)), ExampleAnswer)
    assert first_line.text == "yes,"
    (whole,) = results_of(
        Examiner(lines).examine(make_example(first_line=False), ("full",)), ExampleAnswer
    )
    assert whole.text == "yes, \n no"


def test_of_choices_one_is_given(llm):
    choices = ("the red one", "a blue one")
    for policy in POLICIES:
        (result,) = results_of(
            Examiner(llm).examine(make_example(choices=choices, max_tokens=16), (policy,)),
            ExampleAnswer,
        )
        assert result.text in choices


def test_contexts_over_the_window_are_skipped_or_truncated(llm):
    passages = tuple(f"{number:02d} " + "x" * 97 for number in range(8))
    example = make_example(passages=passages)
    skipped = Examiner(llm).examine(example, POLICIES)
    assert isinstance(skipped, Skipped)
    assert skipped.where == "toys 0"
    assert f"the model takes {WINDOW}" in skipped.reason
    assert "--truncate" in skipped.reason
    (truncated,) = results_of(
        Examiner(llm, truncate=True).examine(example, ("naive",)), ExampleAnswer
    )
    ends = dataclasses.replace(example, passages=(passages[0], passages[1], passages[7]))
    (expected,) = results_of(Examiner(llm).examine(ends, ("naive",)), ExampleAnswer)
    assert truncated.text == expected.text
    assert truncated.cached_tokens == 300
    assert isinstance(
        Examiner(llm, truncate=True).examine(dataclasses.replace(example, whole=True), POLICIES),
        Skipped,
    )
    too_long = make_example(question="x" * 500)
    assert isinstance(Examiner(llm, truncate=True).examine(too_long, POLICIES), Skipped)


def test_an_answer_that_ends_at_once_still_has_a_distribution(llm):
    silent: Any = _Silent(llm)
    full, naive = results_of(
        Examiner(silent).examine(make_example(), ("full", "naive")), ExampleAnswer
    )
    assert full.text == naive.text == ""
    assert full.kl == 0 < naive.kl


def test_a_failing_policy_takes_its_example_out_for_all(llm):
    failing: Any = _Failing(llm, "naive", KVLinkerError("It broke."))
    outcome = Examiner(failing).examine(make_example(), POLICIES)
    assert outcome == Skipped("toys 0", "It broke.")
    assert (
        len(
            results_of(
                Examiner(failing).examine(make_example(), ("full", "legolink-4")), ExampleAnswer
            )
        )
        == 2
    )
    failing = _Failing(llm, "naive", EngineClosedError("Closed."))
    with pytest.raises(EngineClosedError):
        Examiner(failing).examine(make_example(), POLICIES)


class _Wrapped:
    """An LLM, but for what a subclass changes."""

    def __init__(self, llm):
        self._llm = llm

    def __getattr__(self, name):
        return getattr(self._llm, name)


class _Recording(_Wrapped):
    """Remembers its answers."""

    def __init__(self, llm):
        super().__init__(llm)
        self.answers = []

    def chat_completion(self, messages, **options):
        self.answers.append(self._llm.chat_completion(messages, **options))
        return self.answers[-1]


class _Silent(_Wrapped):
    """Every answer ends with its first token."""

    def chat_completion(self, messages, **options):
        ending = self._llm.tokenizer.eos_token_id
        return self._llm.chat_completion(messages, logit_bias={ending: 100}, **options)


class _Failing(_Wrapped):
    def __init__(self, llm, policy, error):
        super().__init__(llm)
        self._policy, self._error = policy, error

    def chat_completion(self, messages, *, policy, **options):
        if policy == self._policy:
            raise self._error
        return self._llm.chat_completion(messages, policy=policy, **options)


class _Said:
    """A model that always says the same."""

    max_model_len = 10_000
    settings = load_settings(prefix_cache="off")

    def __init__(self, text):
        self._text = text
        self.builder = self

    def encode_chunk(self, text):
        return text

    def chat(self, messages):
        return ()

    def generate_context_cache(self, chunks):
        return chunks

    def chat_completion(self, messages, **options):
        from kvlinker.base.types.answers import Timing, Usage
        from kvlinker.llm import Answer

        best = TokenLogprob(1, "x", -0.1)
        return Answer(
            self._text,
            (1,),
            "stop",
            Usage(1, 0, 1),
            Timing(),
            (dataclasses.replace(best, top=(best,)),),
        )


def test_prompts_are_prepared_and_policies_need_no_name(llm):
    """Chunks exchanged for variants that are exact where they stand: nothing is left to repair, so
    naive is full."""

    class Everything(Policy):
        family = "everything"

        def select(self, prompt, evidence):
            return prompt.cached

    def prepare(example, prompt):
        assert len(prompt.chunks) == len(example.passages)
        return llm.engine.cache_prompt(prompt, tenant="default").result()

    example = make_example(3)
    examiner = Examiner(llm, prepare=prepare, unregistered={"everything": Everything()})
    full, naive, everything = results_of(
        examiner.examine(example, ("full", "naive", "everything")), ExampleAnswer
    )
    assert full.text == naive.text == everything.text
    assert naive.kl == pytest.approx(0, abs=1e-4)
    assert (naive.recomputed_fraction, everything.recomputed_fraction) == (0, 1)


def test_prefixes_are_not_to_be_reused(tmp_path):
    settings = load_settings(state_dir=tmp_path, kv_slots=1024, disk_space=0)
    with (
        LLM.from_model(loaded_model("llama"), settings) as llm,
        pytest.raises(InvalidRequestError, match='prefix_cache="off"'),
    ):
        Examiner(llm)
