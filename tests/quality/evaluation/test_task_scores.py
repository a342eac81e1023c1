"""Scores of results made by hand."""

import pytest

from kvlinker.quality.evaluation.examples import ExampleAnswer, Scored
from kvlinker.quality.evaluation.task_scores import task_scores
from tests.quality.evaluation.conftest import make_continuation, make_example


def result(example, policy, text, *, cached=60, recomputed=40, agreement=1.0, kl=0.0, along=0.0):
    first = (agreement, kl)
    return ExampleAnswer(example.digest, policy, cached, recomputed, *first, text, 1.0, along)


def answered():
    first, second, third = (
        make_example(n, answers=("red cat", "blue"), metric="exact_match") for n in range(3)
    )
    return [
        (
            first,
            [result(first, "full", "blue"), result(first, "p", "Blue.", agreement=0.0, kl=0.5)],
        ),
        (
            second,
            [result(second, "full", "red"), result(second, "p", "dog", cached=100, recomputed=0)],
        ),
        (third, [result(third, "full", ""), result(third, "p", "")]),
    ]


def by_name(found):
    return {(score.task, score.policy, score.metric): score for score in found}


def test_every_task_and_all_of_them_get_every_metric():
    found = task_scores(answered(), ["p", "full"])
    rows = by_name(found)
    assert len(rows) == len(found) == 3 * 2 * 10
    assert [score.task for score in found[::20]] == ["even", "odd", "all"]
    assert {score.n for score in found if score.task == "even"} == {2}
    exact = rows["all", "p", "exact_match"]
    assert exact.score == pytest.approx(1 / 3)
    assert exact.main
    assert not rows["all", "p", "f1"].main
    assert exact.ci_low <= exact.score <= exact.ci_high
    assert rows["odd", "full", "f1"].score == pytest.approx(2 / 3)
    assert (exact.agreement, exact.kl) == (pytest.approx(2 / 3), pytest.approx(0.5 / 3))
    assert exact.recomputed_fraction == pytest.approx((0.4 + 0 + 0.4) / 3)


def test_full_is_exactly_like_itself_even_where_it_says_nothing():
    rows = by_name(task_scores(answered(), ["p", "full"]))
    for metric in ("exact_match_vs_full", "rouge_l_vs_full", "jaccard_vs_full"):
        assert rows["all", "full", metric].score == 1
        assert (rows["all", "full", metric].ci_low, rows["all", "full", metric].ci_high) == (1, 1)
    assert rows["odd", "p", "jaccard_vs_full"].score == 0
    assert rows["even", "p", "jaccard_vs_full"].score == 1


def test_differences_from_full_are_paired():
    rows = by_name(task_scores(answered(), ["p", "full"]))
    exact = rows["even", "p", "exact_match"]  # both right on the first, both wrong on the third
    assert (exact.vs_full, exact.vs_full_low, exact.vs_full_high) == (0, 0, 0)
    assert exact.ci_low < exact.ci_high
    assert rows["odd", "p", "f1"].vs_full == pytest.approx(-2 / 3)
    assert all(score.vs_full == 0 for (_, policy, _), score in rows.items() if policy == "full")


def test_one_task_has_no_second_total():
    (one, *_) = answered()
    assert {score.task for score in task_scores([one], ["full"])} == {"even"}


def test_continuations_are_scored_by_their_loss():
    told = []
    for number, (loss, other) in enumerate([(2.0, 2.5), (4.0, 4.25)]):
        example = make_continuation(number)
        told.append(
            (
                example,
                [
                    Scored(example.digest, "full", 0, 100, 1.0, 0.0, loss=loss),
                    Scored(example.digest, "naive", 100, 0, 0.5, 0.1, loss=other),
                ],
            )
        )
    full, naive = task_scores(told, ["full", "naive"])
    assert (naive.metric, naive.main, naive.n) == ("loss", True, 2)
    assert (full.score, naive.score) == (3, 3.375)
    assert naive.vs_full == 0.375
    assert 0.25 <= naive.vs_full_low <= naive.vs_full_high <= 0.5
    assert naive.kl == pytest.approx(0.1)
    assert (naive.agreement, naive.recomputed_fraction) == (0.5, 0)
    assert (full.vs_full_low, full.vs_full_high) == (0, 0)


def test_divergence_along_answers_and_wrong_names_are_told():
    first, second = (make_example(n, wrong=("red", "green")) for n in (0, 2))
    told = [
        (first, [result(first, "full", "blue"), result(first, "p", "Green it is", along=0.5)]),
        (second, [result(second, "full", "red"), result(second, "p", "blue", along=0.1)]),
    ]
    rows = by_name(task_scores(told, ["p", "full"]))
    linked, full = rows["even", "p", "mixed"], rows["even", "full", "mixed"]
    assert (linked.answer_kl, linked.mixed) == (pytest.approx(0.3), 0.5)
    assert (full.answer_kl, full.mixed) == (0, 0.5)
    assert (linked.score, linked.vs_full) == (0.5, 0)
    along = rows["even", "p", "answer_kl"]
    assert along.score == pytest.approx(0.3)
    assert along.ci_low == pytest.approx(0.1)
    assert along.row()["mixed"] == 0.5


def test_what_no_example_tells_is_no_column():
    (one, *_) = answered()
    (score, *_) = task_scores([one], ["full"])
    assert "mixed" not in score.row()
