"""Results to scores by policy, data set and task, with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvlinker.evaluation.answers import REFERENCE, Result
from kvlinker.evaluation.bootstrap import Interval, mean_interval
from kvlinker.evaluation.examples import Example
from kvlinker.evaluation.metrics import METRICS, VERSUS_FULL, best_score, similarity

ALL_TASKS = "all"


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of one metric over ``n`` examples of a task. ``layers``: its parts, for metrics that have one by layer.

    ``main``: it is the metric that the task is usually measured by.
    """

    policy: str
    dataset: str
    task: str
    n: int
    metric: str
    main: bool
    score: float
    interval: Interval
    recomputed_fraction: float
    agreement: float
    kl: float
    layers: tuple[float, ...] = ()


_Answered = tuple[Example, dict[str, Result]]
"""An example and its results by policy."""


def scores(answered: Iterable[tuple[Example, Sequence[Result]]], policies: Sequence[str]) -> list[Score]:
    """All metrics of all tasks, each for all policies; a data set of several tasks also has them under ``all``.

    ``answered`` has the results of ``policies`` for each example, and with them the result of ``full``.
    """
    datasets: dict[str, dict[str, list[_Answered]]] = {}
    for example, results in answered:
        tasks = datasets.setdefault(example.dataset, {})
        tasks.setdefault(example.task, []).append((example, {result.policy: result for result in results}))
    found: list[Score] = []
    for dataset, tasks in datasets.items():
        if len(tasks) > 1:
            tasks[ALL_TASKS] = [one for group in tasks.values() for one in group]
        for task, group in tasks.items():
            for policy in policies:
                found += _scores_of(group, dataset, task, policy)
    return found


def _scores_of(group: Sequence[_Answered], dataset: str, task: str, policy: str) -> Iterable[Score]:
    examples = [example for example, _ in group]
    results = [by_policy[policy] for _, by_policy in group]
    references = [by_policy[REFERENCE] for _, by_policy in group]
    values: dict[str, list[float]] = {
        name: [best_score(metric, r.text, e.answers) for e, r in zip(examples, results, strict=True)]
        for name, metric in METRICS.items()
    }
    for name, metric in VERSUS_FULL.items():
        pairs = zip(results, references, strict=True)
        values[name] = [similarity(metric, result.text, full.text) for result, full in pairs]
    layers: dict[str, tuple[float, ...]] = {}
    deviations = [result.deviation for result in results if result.deviation is not None]
    if deviations:
        for name, by_layer in (
            ("kv_deviation", [deviation.kv for deviation in deviations]),
            ("attention_deviation", [deviation.attention for deviation in deviations]),
        ):
            values[name] = [fmean(one) for one in by_layer]
            layers[name] = tuple(fmean(layer) for layer in zip(*by_layer, strict=True))
    mains = {example.metric for example in examples}
    main = mains.pop() if len(mains) == 1 else "f1"
    for name, numbers in values.items():
        yield Score(
            policy=policy,
            dataset=dataset,
            task=task,
            n=len(numbers),
            metric=name,
            main=name == main,
            score=fmean(numbers),
            interval=mean_interval(numbers),
            recomputed_fraction=fmean(result.recomputed_fraction for result in results),
            agreement=fmean(result.agreed for result in results),
            kl=fmean(result.kl for result in results),
            layers=layers.get(name, ()),
        )
