"""Measures answers against references, and against one another."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from kvlinker.quality.libraries import bench_library

Metric = Callable[[str, str], float]
"""Scores an answer (first) against a reference (second), from 0 to 1."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Normalise as SQuAD does (Rajpurkar et al. 2016): lower case, no punctuation, no articles,
    single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """Return 1 if the two are the same once normalise (SQuAD), else 0."""
    return float(normalise(answer) == normalise(reference))


def f1(answer: str, reference: str) -> float:
    """Return SQuAD's F1: the harmonic mean of precision and recall over normalise words, counted
    with multiplicity.

    Where either has no word, it is 1 if neither has one, else 0.
    """
    words, expected = normalise(answer).split(), normalise(reference).split()
    if not words or not expected:
        return float(words == expected)
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected))


def jaccard(answer: str, reference: str) -> float:
    """Return words in both over words in either, normalise, without multiplicity; 1 if neither has
    any."""
    words, expected = set(normalise(answer).split()), set(normalise(reference).split())
    either = words | expected
    return len(words & expected) / len(either) if either else 1.0


@lru_cache(maxsize=2**16)  # slow for long answers, which several tables score
def rouge_l(answer: str, reference: str) -> float:
    """Return the F-measure of the longest common subsequence of words, with Porter's stemmer, as
    CacheBlend does.

    Raises InvalidRequestError without the package rouge-score.
    """
    score: float = rouge_scorer().score(reference, answer)["rougeL"].fmeasure
    return score


@cache
def rouge_scorer() -> Any:
    """Return rouge-score's scorer of ``rouge_l``. Raises InvalidRequestError without the
    package."""
    return bench_library("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)


def names(answer: str, reference: str) -> float:
    """Return 1 if the answer has the reference's words one after the other, both normalise, else
    0."""
    return float(f" {normalise(reference)} " in f" {normalise(answer)} ")


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "f1": f1,
    "rouge_l": rouge_l,
    "jaccard": jaccard,
    "names": names,
}
"""Metrics against the references of a data set, by name."""

VERSUS_FULL: dict[str, Metric] = {
    "exact_match_vs_full": exact_match,
    "rouge_l_vs_full": rouge_l,
    "jaccard_vs_full": jaccard,
}
"""Metrics against the answer that the same model gives when it computes everything (Cache-Craft,
section 5.1). Of a choice between answers, the first is how often the choice is kept."""


def best_score(metric: Metric, answer: str, references: Sequence[str]) -> float:
    """Return the score against the reference for which it is highest."""
    return max(metric(answer, reference) for reference in references)


def similarity(metric: Metric, answer: str, other: str) -> float:
    """Return the score between two answers of a model; 1 if they are the same text, be it one
    without words."""
    return 1.0 if answer == other else metric(answer, other)
