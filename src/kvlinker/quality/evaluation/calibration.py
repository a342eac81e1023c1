"""Finds the cheapest setting of a policy that is good enough: Cache-Craft's equation 13, for any
such policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.linking import known_policies, parse_policy
from kvlinker.linking.parameters import Number, declared
from kvlinker.linking.policy import SIGN
from kvlinker.quality.evaluation.evaluate import evaluate
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import REFERENCE, Example, Question, Result, Skipped
from kvlinker.quality.evaluation.task_scores import main_score
from kvlinker.quality.progress import Progress, silent

PLACE = "{}"
"""The place of the number in a policy's name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The quality and the cost of a policy with one number."""

    policy: str
    n: int
    """Number of examples."""
    score: float
    """The mean score over the examples."""
    of_full: float
    """The score as a share of full's."""
    recomputed_fraction: float
    """The share of cached tokens that is computed again, the mean over the examples."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Holds all candidates that were tried, and chooses one."""

    target: float
    """The wanted share of full's score."""
    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]
    """The examples that could not be asked."""

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that computes least of those that reach the target; None if none does."""
        reached = [candidate for candidate in self.candidates if candidate.of_full >= self.target]
        return min(reached, key=lambda candidate: candidate.recomputed_fraction, default=None)


def candidates_of(template: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return the policies that ``template``, such as ``cachecraft-{}-focus``, names with each of
    the values.

    Raises InvalidRequestError without a place for the value, and PolicyError for a bad policy.
    """
    _require_place(template)
    return tuple(parse_policy(template.replace(PLACE, value.strip())).name for value in values)


def trial_values(template: str) -> tuple[str, ...]:
    """Return values to try in the place of ``template``, from the range of the parameter that
    stands there.

    Raises InvalidRequestError if no number of the policy's stands there, and PolicyError for an
    unknown policy.
    """
    _require_place(template)
    part = next(part for part in template.split(SIGN) if PLACE in part)
    known = known_policies()
    families = [name for name in known if part.startswith(f"{name}-")] or [
        parse_policy(part).family
    ]
    family = known[max(families, key=len)]
    for name, parameter in declared(family).items():
        if isinstance(parameter, Number) and all(
            _reads(part, name, value) for value in parameter.trials[:2]
        ):
            return tuple(f"{value:g}" for value in parameter.trials)
    raise InvalidRequestError(
        f"{template!r} has {PLACE} where no number goes. This policy is written {family.usage()}.",
        param="policy",
    )


def _reads(part: str, name: str, value: float) -> bool:
    """Return whether the parameter ``name`` has this value in place of ``part``."""
    try:
        return bool(getattr(parse_policy(part.replace(PLACE, f"{value:g}")), name) == value)
    except PolicyError:
        return False


def _require_place(template: str) -> None:
    """Raise InvalidRequestError without a place for the number."""
    if template.count(PLACE) != 1:
        raise InvalidRequestError(
            f"{template!r} must have one {PLACE} where the number goes, as in cachecraft-{PLACE}.",
            param="policy",
        )


def calibrate(
    examiner: Examiner,
    examples: Sequence[Example],
    policies: Sequence[str],
    *,
    target: float,
    progress: Progress = silent,
) -> Calibration:
    """Score every policy on the examples, each by the metric that its task is usually measured by.

    Raises InvalidRequestError for examples without answers, when none could be asked, and when full
    answers none of them right; PolicyError for a policy that the engine cannot follow.
    """
    questions = [example for example in examples if isinstance(example, Question)]
    if len(questions) < len(examples):
        raise InvalidRequestError(
            "Policies are chosen by their answers: give a data set of questions.", param="dataset"
        )
    asked = list(dict.fromkeys((*policies, REFERENCE)))
    skipped: list[Skipped] = []
    found: dict[str, list[tuple[float, Result]]] = {policy: [] for policy in asked}
    for done, (example, results) in enumerate(evaluate(examiner, examples, asked)):
        progress("examples", done + 1, len(examples))
        if isinstance(results, Skipped):
            skipped.append(results)
            continue
        for result in results:
            found[result.policy].append((main_score(example, result), result))
    full = fmean(score for score, _ in found[REFERENCE]) if found[REFERENCE] else 0.0
    if not full:
        reason = (
            f"{skipped[0].where}: {skipped[0].reason}"
            if skipped
            else "full prefill answers none of them right"
        )
        raise InvalidRequestError(
            f"These examples cannot tell settings apart: {reason}.", param="dataset"
        )
    candidates = tuple(
        _candidate(policy, found[policy], full) for policy in dict.fromkeys(policies)
    )
    return Calibration(target, candidates, tuple(skipped))


def _candidate(policy: str, results: Sequence[tuple[float, Result]], full: float) -> Candidate:
    score = fmean(score for score, _ in results)
    recomputed = fmean(result.recomputed_fraction for _, result in results)
    return Candidate(policy, len(results), score, score / full, recomputed)
