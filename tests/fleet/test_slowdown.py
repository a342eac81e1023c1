"""What answers under way cost others is learnt from requests."""

from __future__ import annotations

import random

import pytest

from kvlinker.fleet.slowdown import MOST_SHARE, Slowdown


def learnt(share: float, *, most: int, requests: int = 1000, noise: float = 0.3) -> float:
    """What is learnt where requests take longer by such a share for each of 0 to ``most``
    answers."""
    chance, slowdown = random.Random(0), Slowdown()
    for _ in range(requests):
        answers = chance.randint(0, most)
        expected = chance.uniform(0.01, 0.1)
        usual = 1 + share * most / 2  # the mean is expected already
        took = (1 + share * answers) / usual * chance.uniform(1 - noise, 1 + noise)
        slowdown.note(answers, expected, expected * took)
    return slowdown.share


def test_nothing_is_learnt_from_nothing() -> None:
    assert Slowdown().share == MOST_SHARE
    assert learnt(0.0, most=0) == MOST_SHARE, "always alike: no difference tells"


@pytest.mark.parametrize("share", [0.0, 0.005, 0.02])
def test_the_share_is_found(share: float) -> None:
    usual = 1 + share * 20
    assert learnt(share, most=40) == pytest.approx(share / usual, abs=0.004)


def test_the_share_stays_within_its_bounds() -> None:
    assert learnt(0.5, most=2) == MOST_SHARE
    assert learnt(-0.02, most=40) == 0.0


def test_a_single_late_answer_changes_little() -> None:
    slowdown = Slowdown()
    for number in range(500):
        slowdown.note(number % 20, 0.1, 0.1)
    before = slowdown.share
    slowdown.note(19, 0.001, 60.0)
    assert slowdown.share - before < 0.015
