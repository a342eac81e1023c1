"""Runs that are in order, that can be stopped, and that give the same when they go on."""

import json
import threading
from _thread import interrupt_main
from collections.abc import Generator

import pytest

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.llm import LLM
from kvlinker.quality.evaluation.evaluate import Journal, evaluate
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import ExampleAnswer, Scored, Skipped
from kvlinker.settings import load_settings
from tests.quality.evaluation.conftest import make_example, results_of
from tests.toy_models import loaded_model
from tests.waiting import PATIENCE

POLICIES = ("full", "naive", "legolink-4")
EXAMPLES = [make_example(number) for number in range(5)]


class _Counting(Examiner):
    """Remembers what it was asked."""

    def examine(self, example, policies, together=()):
        asked.append(example.id)
        return super().examine(example, policies, together)


asked: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_asked():
    asked.clear()


def texts(outcomes):
    return [
        (example.id, [(result.policy, result.text) for result in results])
        for example, results in outcomes
    ]


@pytest.mark.whole
def test_outcomes_come_in_order_and_are_the_same_one_by_one_and_at_once(llm):
    alone = list(evaluate(Examiner(llm), EXAMPLES, POLICIES))
    together = list(evaluate(Examiner(llm, one_by_one=False), EXAMPLES, POLICIES, concurrency=4))
    assert [example for example, _ in together] == EXAMPLES
    assert texts(alone) == texts(together)
    assert list(evaluate(Examiner(llm), EXAMPLES, POLICIES)) == alone


@pytest.mark.whole
def test_a_stopped_run_goes_on_where_it_was(llm, tmp_path):
    path = tmp_path / "run.jsonl"
    whole = list(evaluate(Examiner(llm), EXAMPLES, POLICIES))
    running = evaluate(_Counting(llm), EXAMPLES, POLICIES, journal=Journal(path, {"model": "m"}))
    first = [next(running) for _ in range(2)]
    assert isinstance(running, Generator)
    running.close()
    asked.clear()
    with path.open("a") as file:
        file.write('{"example": "cut of')
    rest = list(evaluate(_Counting(llm), EXAMPLES, POLICIES, journal=Journal(path, {"model": "m"})))
    assert first == rest[:2]
    assert rest == whole
    assert set(asked).isdisjoint({"0", "1"})
    asked.clear()
    assert (
        list(evaluate(_Counting(llm), EXAMPLES, POLICIES, journal=Journal(path, {"model": "m"})))
        == whole
    )
    assert asked == []


class _Interrupted(Examiner):
    """Gets the signal of Ctrl+C at the second example, and ends when it may."""

    may_end = threading.Event()

    def examine(self, example, policies, together=()):
        if example is EXAMPLES[1]:
            interrupt_main()
            assert self.may_end.wait(PATIENCE)
        return super().examine(example, policies, together)


def test_an_interrupted_run_does_not_wait_for_its_example(llm):
    running = evaluate(_Interrupted(llm), EXAMPLES, ["full"])
    with pytest.raises(KeyboardInterrupt):
        list(running)
    _Interrupted.may_end.set()


def test_more_policies_are_asked_of_a_finished_run(llm, tmp_path):
    path = tmp_path / "run.jsonl"
    list(evaluate(_Counting(llm), EXAMPLES[:2], ("full",), journal=Journal(path, {})))
    asked.clear()
    results = list(evaluate(_Counting(llm), EXAMPLES[:2], POLICIES, journal=Journal(path, {})))
    assert asked == ["0", "1"]
    assert results == list(evaluate(Examiner(llm), EXAMPLES[:2], POLICIES))
    assert len(path.read_text().splitlines()) == 1 + 2 * len(POLICIES)


def test_a_changed_example_is_asked_again(llm, tmp_path):
    path = tmp_path / "run.jsonl"
    list(evaluate(_Counting(llm), EXAMPLES[:1], ("full",), journal=Journal(path, {})))
    asked.clear()
    list(
        evaluate(
            _Counting(llm),
            [make_example(0, question="Else?")],
            ("full",),
            journal=Journal(path, {}),
        )
    )
    assert asked == ["0"]


def test_a_policy_that_the_engine_cannot_follow_is_refused_before_anything_is_asked(tmp_path):
    settings = load_settings(state_dir=tmp_path, disk_space=0, prefix_cache="off")
    with LLM.from_model(loaded_model("mamba-alone"), settings) as llm:
        with pytest.raises(PolicyError, match="The policy query-5 needs the question's attention"):
            list(evaluate(_Counting(llm), EXAMPLES, ("naive", "query-5")))
        examiner = _Counting(llm, others={"int8": Examiner(llm)})
        with pytest.raises(PolicyError, match="The policy h2o-5 needs scores"):
            list(evaluate(examiner, EXAMPLES, ("naive", "h2o-5@int8")))
    assert not asked


def test_skipped_examples_are_not_journaled(llm, tmp_path):
    long = make_example(9, question="x" * 1000)
    path = tmp_path / "run.jsonl"
    (_, outcome), (_, results) = evaluate(
        Examiner(llm), [long, EXAMPLES[0]], ("full",), journal=Journal(path, {})
    )
    assert isinstance(outcome, Skipped)
    assert [result.policy for result in results_of(results, ExampleAnswer)] == ["full"]
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "own", [{"text": "a\nb", "answer_agreement": 1.0, "answer_kl": 0.25}, {"loss": 1 / 3}]
)
def test_results_survive_the_journal_with_all_their_fields(tmp_path, own):
    kind = ExampleAnswer if "text" in own else Scored
    result = kind("d", "naive", 1, 2, 0.5, 0.1 + 0.2, **own)
    Journal(tmp_path / "run.jsonl", {"a": (1,)}).add([result])
    assert Journal(tmp_path / "run.jsonl", {"a": (1,)}).get("d", ["naive"]) == (result,)
    assert Journal(tmp_path / "run.jsonl", {"a": (1,)}).get("d", ["naive", "full"]) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"settings": {"max_tokens": 8}}) + "\n", "max_tokens was 8 and is 16"),
        ("some notes\n", "cannot be used to resume"),
        ("[1]\n", "cannot be used to resume"),
        (
            json.dumps({"settings": {"max_tokens": 16}}) + '\n{"example": 1}\n',
            "cannot be used to resume",
        ),
    ],
)
def test_files_of_other_runs_are_refused(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=message):
        Journal(path, {"max_tokens": 16})
    assert path.read_text() == content
