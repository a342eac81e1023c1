from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvlinker.vllm.pace import LEAST_TOKENS, StepPace


class Machine:
    """Steps take ``plain`` seconds, and a second more per ``rate`` tokens that are linked."""

    def __init__(self, plain, rate, most=10_000):
        self.plain, self.rate, self.now = plain, rate, 0.0
        self.pace = StepPace(most, clock=lambda: self.now)

    def step(self, cost=None, busy=True):
        budget = self.pace.next_budget() if cost is None else cost
        self.pace.planned(cost=budget, busy=busy)
        self.now += self.plain + budget / self.rate
        self.pace.ended()
        return budget


@given(st.floats(0.001, 1), st.floats(1, 1e6))
def test_linking_takes_as_long_as_the_rest_and_every_second_step_has_none(plain, rate):
    machine = Machine(plain, rate, most=10**9)
    budgets = [machine.step() for _ in range(60)]
    assert not any(before and after for before, after in pairwise(budgets))
    last = max(budgets[-2:])
    assert abs(last - max(LEAST_TOKENS, plain * rate)) <= 0.01 * last + 1


def test_the_most_is_never_exceeded():
    machine = Machine(1.0, 1e6, most=100)
    assert max(machine.step() for _ in range(20)) == 100
    assert StepPace(5).budget == 5


def test_steps_that_were_not_busy_teach_nothing():
    machine = Machine(0.01, 1000)
    for _ in range(10):
        machine.step()
    before = machine.pace.budget
    machine.now += 100
    machine.step(cost=0, busy=False)
    machine.now += 100
    machine.step(cost=5000, busy=False)
    machine.step(cost=0)
    assert machine.pace.budget == before


def test_outputs_without_a_step_are_ignored():
    pace = StepPace(100, clock=lambda: 1.0)
    pace.ended()
    assert pace.budget == LEAST_TOKENS
