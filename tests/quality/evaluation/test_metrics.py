"""Metrics against the definitions and packages that they follow."""

import re
import string
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from kvlinker.quality.evaluation.metrics import (
    best_score,
    exact_match,
    f1,
    jaccard,
    names,
    normalise,
    rouge_l,
    similarity,
)

WORDS = st.lists(
    st.sampled_from(["the", "a", "cat", "cats", "Sat", "mat.", "U.S.", "an", "x"]), max_size=8
).map(" ".join)


def squad_normalised(text):
    """``normalize_answer`` of SQuAD's evaluation, step by step."""
    text = text.lower()
    text = "".join(ch for ch in text if ch not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def squad_f1(answer, reference):
    """``compute_f1`` of SQuAD's evaluation, step by step."""
    answer_words = squad_normalised(answer).split()
    reference_words = squad_normalised(reference).split()
    same = sum((Counter(reference_words) & Counter(answer_words)).values())
    if len(reference_words) == 0 or len(answer_words) == 0:
        return int(reference_words == answer_words)
    if same == 0:
        return 0
    precision = 1.0 * same / len(answer_words)
    recall = 1.0 * same / len(reference_words)
    return (2 * precision * recall) / (precision + recall)


@given(WORDS, WORDS)
def test_f1_and_exact_match_are_squads(answer, reference):
    assert normalise(answer) == squad_normalised(reference) or not exact_match(answer, reference)
    assert exact_match(answer, reference) == (
        squad_normalised(answer) == squad_normalised(reference)
    )
    assert f1(answer, reference) == pytest.approx(squad_f1(answer, reference))


@given(WORDS, WORDS)
def test_rouge_l_is_the_packages(answer, reference):
    expected = RougeScorer(["rougeL"], use_stemmer=True).score(reference, answer)["rougeL"].fmeasure
    assert rouge_l(answer, reference) == pytest.approx(expected)


BY_HAND: list[tuple[Callable[[str, str], float], str, str, float]] = [
    (exact_match, "The  Exeter College.", "exeter college", 1),
    (exact_match, "Exeter", "Exeter College", 0),
    (f1, "Exeter", "Exeter College", 2 / 3),
    (f1, "new new york", "new york city", 2 / 3),
    (f1, "the", "a", 1),
    (f1, "", "x", 0),
    (jaccard, "new new york", "new york city", 2 / 3),
    (jaccard, "", "the", 1),
    (jaccard, "x", "y", 0),
    (rouge_l, "the cat sat", "the dog sat", 2 / 3),
    (rouge_l, "cats", "cat", 1),
    (rouge_l, "sat the", "the sat", 1 / 2),
]


def test_cases_by_hand(subtests):
    for metric, answer, reference, expected in BY_HAND:
        with subtests.test(metric.__name__, answer=answer, reference=reference):
            assert metric(answer, reference) == pytest.approx(expected)


def test_the_best_reference_counts():
    assert best_score(f1, "paris", ["london", "paris france", "rome"]) == pytest.approx(2 / 3)


def test_the_same_answer_is_always_fully_similar():
    assert rouge_l("", "") == rouge_l("日本", "日本") == 0
    assert similarity(rouge_l, "", "") == similarity(rouge_l, "日本", "日本") == 1
    assert similarity(jaccard, "x y", "x z") == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It was Clara Varga, in Linz.", 1),
        ("VARGA!", 1),
        ("The Vargas founded it.", 0),
        ("", 0),
        ("It was Clara, and Varga is in Linz.", 1),
    ],
)
def test_an_answer_names_whole_words(answer, expected):
    assert names(answer, "Varga") == expected


def test_an_answer_names_words_that_stand_together():
    assert names("Born in the New York of 1911", "new york") == 1
    assert names("A new bridge in York", "New York") == 0
