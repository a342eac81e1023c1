"""How many replicas there are to be."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker_fleet.ray_serve.scaling import REMEMBERED_SECONDS, REQUESTS, TTFT, Load, Scaling


@dataclass
class Told:
    """What Ray Serve tells."""

    current_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)


def told(requests: list[float], ttft: float = 0.0) -> Told:
    figures = {REQUESTS: requests, TTFT: [ttft] * len(requests)}
    return Told(
        len(requests), {name: {str(n): x for n, x in enumerate(f)} for name, f in figures.items()}
    )


LOADS = [
    ([8.0], 0.0, 2.0),
    ([4.0, 2.0, 0.0], 0.0, 1.5),
    ([0.0], 0.0, 0.0),
    ([1.0, 1.0], 0.9, 2.0),  # late, but not too late: nobody is given up
    ([1.0, 1.0], 1.5, 3.0),
    ([1.0, 1.0], 9.0, 4.0),  # at most twice as many
    ([20.0, 20.0], 1.5, 10.0),
]


def test_requests_and_first_tokens_count(subtests: pytest.Subtests) -> None:
    for requests, ttft, wanted in LOADS:
        with subtests.test(requests=requests, ttft=ttft):
            assert Scaling(4.0, target_ttft=1.0)(told(requests, ttft)) == (wanted, {})


def test_without_a_target_first_tokens_do_not_count() -> None:
    assert Scaling(4.0)(told([2.0], 100.0))[0] == 0.5


def test_replicas_that_tell_nothing_stay() -> None:
    assert Scaling(4.0)(Told(3))[0] == 3


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20), st.floats(0, 1e3))
def test_late_tokens_never_make_fewer(requests: list[float], ttft: float) -> None:
    policy = Scaling(4.0, target_ttft=1.0)
    assert policy(told(requests, ttft))[0] >= policy(told(requests))[0]


def test_load_forgets_old_first_tokens() -> None:
    now = 0.0
    load = Load(lambda: 3, clock=lambda: now)
    assert load.figures() == {REQUESTS: 3.0, TTFT: 0.0}
    for seconds in range(10):
        load.first_token(float(seconds))
    assert load.figures()[TTFT] == 8.0
    now = REMEMBERED_SECONDS + 1
    load.first_token(0.5)
    assert len(load._first_tokens) == 1  # also where nobody asks for figures
    assert load.figures()[TTFT] == 0.5
