"""Turns results into scores by policy, data set and task, with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp
from statistics import fmean
from typing import Any

from kvlinker.quality.evaluation.examples import REFERENCE, Example, ExampleAnswer, Question, Result
from kvlinker.quality.evaluation.metrics import METRICS, VERSUS_FULL, best_score, similarity
from kvlinker.quality.evaluation.statistics import mean_interval

ALL_TASKS = "all"
"""The name of all tasks of a data set together."""


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The mean of one metric over the examples of a task. Higher is better, except for losses. The
    bounds are those of 95% intervals."""

    policy: str
    dataset: str
    task: str
    n: int
    """Number of examples."""
    metric: str
    main: bool
    """True for the metric that the task is usually measured by."""
    score: float
    ci_low: float
    ci_high: float
    vs_full: float
    """The mean difference from full's score on the same examples, with its bounds below."""
    vs_full_low: float
    vs_full_high: float
    recomputed_fraction: float
    agreement: float
    kl: float
    answer_agreement: float | None
    """None where a text was scored."""
    answer_kl: float | None
    mixed: float | None
    """The share of the answers with a wrong name; None where no example has wrong names."""

    def row(self) -> dict[str, Any]:
        """Return the row of a report: the fields that are known, and a loss's perplexity."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return known | ({"perplexity": exp(self.score)} if self.metric == "loss" else {})


_ByPolicy = tuple[Example, dict[str, Result]]
"""Pairs an example with its results by policy."""


def task_scores(
    answered: Iterable[tuple[Example, Sequence[Result]]], policies: Sequence[str]
) -> list[TaskScore]:
    """Score all tasks by all metrics, each for all policies; a data set of several tasks also has
    them under ``all``.

    ``answered`` has the results of ``policies`` for each example, and with them the result of
    ``full``.
    """
    datasets: dict[str, dict[str, list[_ByPolicy]]] = {}
    for example, results in answered:
        tasks = datasets.setdefault(example.dataset, {})
        tasks.setdefault(example.task, []).append(
            (example, {result.policy: result for result in results})
        )
    found: list[TaskScore] = []
    for dataset, tasks in datasets.items():
        if len(tasks) > 1:
            tasks[ALL_TASKS] = [one for group in tasks.values() for one in group]
        for task, group in tasks.items():
            for policy in policies:
                found += _scores_of(group, dataset, task, policy)
    return found


def main_score(example: Example, result: Result) -> float:
    """Score one result by the metric that its task is usually measured by."""
    if isinstance(result, ExampleAnswer):
        assert isinstance(example, Question)
        return best_score(METRICS[example.metric], result.text, example.answers)
    return result.loss


def _scores_of(
    group: Sequence[_ByPolicy], dataset: str, task: str, policy: str
) -> Iterator[TaskScore]:
    results = [by_policy[policy] for _, by_policy in group]
    values, full_values = _values(group, policy), _values(group, REFERENCE)
    mains = {example.metric for example, _ in group}
    main = mains.pop() if len(mains) == 1 else "f1"
    for name, numbers in values.items():
        differences = [mine - full for mine, full in zip(numbers, full_values[name], strict=True)]
        interval, difference_interval = mean_interval(numbers), mean_interval(differences)
        yield TaskScore(
            policy=policy,
            dataset=dataset,
            task=task,
            n=len(numbers),
            metric=name,
            main=name == main,
            score=fmean(numbers),
            ci_low=interval.low,
            ci_high=interval.high,
            vs_full=fmean(differences),
            vs_full_low=difference_interval.low,
            vs_full_high=difference_interval.high,
            recomputed_fraction=fmean(result.recomputed_fraction for result in results),
            agreement=fmean(result.agreement for result in results),
            kl=fmean(result.kl for result in results),
            answer_agreement=_mean_of(values, "answer_agreement"),
            answer_kl=_mean_of(values, "answer_kl"),
            mixed=_mean_of(values, "mixed"),
        )


def _mean_of(values: Mapping[str, Sequence[float]], metric: str) -> float | None:
    return fmean(values[metric]) if metric in values else None


def _values(group: Sequence[_ByPolicy], policy: str) -> dict[str, list[float]]:
    """Return the values for all examples, in order, by the metrics that all of them have."""
    measured = [
        _measures(example, by_policy[policy], by_policy[REFERENCE]) for example, by_policy in group
    ]
    shared = [name for name in measured[0] if all(name in measures for measures in measured)]
    return {name: [measures[name] for measures in measured] for name in shared}


def _measures(example: Example, result: Result, full: Result) -> dict[str, float]:
    """Measure one result by every metric."""
    measures: dict[str, float] = {}
    if isinstance(result, ExampleAnswer):
        assert isinstance(example, Question)
        assert isinstance(full, ExampleAnswer)
        for name, metric in METRICS.items():
            measures[name] = best_score(metric, result.text, example.answers)
        for name, metric in VERSUS_FULL.items():
            measures[name] = similarity(metric, result.text, full.text)
        measures["answer_agreement"] = result.answer_agreement
        measures["answer_kl"] = result.answer_kl
        if example.wrong:
            measures["mixed"] = best_score(METRICS["names"], result.text, example.wrong)
    else:
        measures["loss"] = result.loss
    return measures
