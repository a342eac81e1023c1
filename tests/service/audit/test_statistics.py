"""Intervals and sequential tests: what they promise, in simulations and against known values."""

import math
import random

import pytest
from scipy.stats import binomtest

from kvlinker.service.audit.statistics import (
    BASELINE_SAMPLES,
    FALSE_ALARM_SAMPLES,
    DriftDetector,
    RateTest,
    RepeatedTest,
    clopper_pearson,
    higher_failure_rates,
)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (7, 7), (3, 10), (196, 200), (1, 1)])
def test_intervals_are_the_exact_ones(successes, trials):
    exact = binomtest(successes, trials).proportion_ci(0.95, method="exact")
    assert clopper_pearson(successes, trials) == pytest.approx((exact.low, exact.high))


def test_without_answers_nothing_is_known():
    assert clopper_pearson(0, 0) == (0.0, 1.0)


def outcomes(rate, count, seed):
    draw = random.Random(seed)
    return [draw.random() < rate for _ in range(count)]


def crossed(test, successes, threshold=20.0):
    """The number of answers after which the evidence reached the threshold; None if it never
    did."""
    for number, success in enumerate(successes, 1):
        test.note(success)
        if test.evidence >= threshold:
            return number
    return None


def test_alternatives_are_on_the_other_side():
    assert all(0.02 < rate < 1 for rate in higher_failure_rates(0.98))


@pytest.mark.parametrize(("make", "rate"), [(RateTest.falls_below, 0.98), (RateTest.exceeds, 0.98)])
def test_a_true_hypothesis_is_rarely_refuted_however_often_one_looks(make, rate):
    refuted = sum(crossed(make(0.98), outcomes(rate, 500, seed)) is not None for seed in range(200))
    assert refuted <= 10, "at most 5%"


def test_what_stays_true_is_rarely_refuted_however_often_the_test_is_repeated():
    refuted = 0
    for seed in range(100):
        test = RepeatedTest(lambda: RateTest.falls_below(0.98), 0.05)
        for success in outcomes(0.98, 1000, seed):
            test.note(success)
            if test.refuted:
                refuted += 1
                break
    assert refuted <= 5, "at most 5%"


def test_what_was_true_for_long_is_refuted_soon_after():
    test = RepeatedTest(lambda: RateTest.falls_below(0.98), 0.05)
    for success in [True] * 5000 + outcomes(0.5, 60, 0):
        test.note(success)
    assert test.refuted
    assert test.samples < 200
    assert test.successes < test.samples


@pytest.mark.parametrize(("rate", "most"), [(0.5, 15), (0.8, 50), (0.9, 150)])
def test_a_rate_below_is_found_soon(rate, most):
    found = [crossed(RateTest.falls_below(0.98), outcomes(rate, 1000, seed)) for seed in range(50)]
    assert all(number is not None for number in found)
    assert sorted(found)[40] <= most


def test_a_rate_above_is_found():
    assert crossed(RateTest.exceeds(0.98), [True] * 300) < 250
    assert crossed(RateTest.exceeds(0.9), outcomes(0.98, 1000, 0)) is not None


def test_evidence_is_a_likelihood_ratio():
    test = RateTest(0.9, [0.5])
    for success in (True, False, True):
        test.note(success)
    assert test.evidence == pytest.approx((0.5 / 0.9) ** 2 * (0.5 / 0.1))


def test_a_fall_is_noticed_and_the_new_rate_learnt():
    detector = DriftDetector()
    assert not any(detector.note(success) for success in outcomes(0.97, 1000, 1))
    alarms = [
        number for number, success in enumerate(outcomes(0.75, 500, 2)) if detector.note(success)
    ]
    assert len(alarms) == 1
    assert alarms[0] < 80
    assert detector.alarms == 1


def test_false_alarms_are_as_rare_as_promised():
    """Between alarms, on average: the first answers, and as many again as are promised."""
    alarms = answers = 0
    for seed in range(10):
        detector = DriftDetector()
        for success in outcomes(0.95, 3000, seed):
            detector.note(success)
        alarms, answers = alarms + detector.alarms, answers + 3000
    assert alarms <= answers / (FALSE_ALARM_SAMPLES + BASELINE_SAMPLES)


def test_nothing_overflows():
    test = RateTest.falls_below(0.98)
    for _ in range(5000):
        test.note(False)
    assert math.isfinite(test.evidence)
