import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker_vllm.scheduler.transfer_throttle import (
    CAPACITY,
    LEAST_TOKENS,
    MEASURED_EVERY,
    MOST_OWED,
    MOST_WAITING,
    PAUSE,
    StepWork,
    TransferThrottle,
)

PLAIN = StepWork()


class Machine:
    """A step of decoding takes ``plain`` seconds; tokens that are linked or prefilled more, and a
    pass of linking has a price of its own."""

    def __init__(
        self, plain=0.03, *, computed=0.003, placed=3e-5, fixed=0.02, most=10_000, slowdown=1.5
    ):
        self.plain, self.computed, self.placed, self.fixed = plain, computed, placed, fixed
        self.now = 0.0
        self.gaps = []
        self.throttle = TransferThrottle(most, slowdown=slowdown, clock=lambda: self.now)

    def step(self, work=PLAIN):
        self.throttle.note_plan(work)
        seconds = (
            self.plain
            + work.placed * self.placed
            + (work.computed + work.prefilled) * self.computed
        )
        seconds += self.fixed if work.computed else 0.0
        self.now += seconds
        self.gaps.append(seconds)
        self.throttle.note_end()

    def link(self, placed, computed, own):
        """As the scheduler does it, the request's own first step included; the mean gap of a
        neighbour meanwhile."""
        first = len(self.gaps)
        while placed or computed:
            tokens = self.throttle.tokens
            now_placed = min(placed, int(tokens * self.throttle.placed_per_computed))
            now_computed = min(computed, int(tokens)) if now_placed == 0 else 0
            if now_placed == placed and now_computed == computed:
                if self.throttle.may_end(
                    own + computed + placed / self.throttle.placed_per_computed
                ):
                    self.throttle.spend(own)
                else:
                    now_placed = now_computed = 0
            self.step(StepWork(now_placed, now_computed))
            placed, computed = placed - now_placed, computed - now_computed
        self.step(StepWork(prefilled=own))
        self.linked_steps = len(self.gaps) - first
        return sum(self.gaps[first:]) / self.linked_steps


@given(
    st.floats(0.005, 0.2),
    st.floats(0.001, 0.15),
    st.floats(1.1, 3),
    st.sampled_from([0, 112, 600]),
    st.integers(1, 40),
)
def test_neighbours_wait_no_longer_than_they_shall(plain, share, slowdown, tokens, own):
    """Also where one request follows the other."""
    computed = share * plain
    machine = Machine(
        plain, computed=computed, placed=computed / 100, fixed=plain / 2, slowdown=slowdown
    )
    for _ in range(20):
        machine.step()
    machine.link(512, 64, 32)  # what is learnt first is learnt at some price
    while machine.throttle.tokens == 0:
        machine.step()
    machine.throttle.idle()
    owed = max(own * computed - CAPACITY * plain, 0.0)  # more than that is not saved for
    for _ in range(2):
        mean = machine.link(4096, tokens, own)
        assert mean <= 1.1 * slowdown * plain + owed / machine.linked_steps


def test_a_slice_takes_as_long_as_the_rest_of_its_step():
    machine = Machine(0.1, computed=1e-3, fixed=0.0)
    machine.step()
    for _ in range(9):
        machine.step()
        machine.step(StepWork(0, machine.throttle.tokens))
        machine.step()
        machine.step()
    assert machine.throttle.tokens == pytest.approx(100, rel=0.05)
    assert Machine(0.1, most=5).throttle.tokens == 5


def test_where_more_wait_more_is_linked():
    for waiting, counted in ((1, 1), (4, 4), (100, MOST_WAITING)):
        machine = Machine(0.1, computed=1e-3, fixed=0.0)
        machine.throttle.expect(waiting)
        for _ in range(3):
            machine.step()
        machine.step(StepWork(prefilled=10))
        assert machine.throttle.tokens == pytest.approx(100 * counted, rel=0.01)
        for _ in range(40):
            machine.step(StepWork(0, machine.throttle.tokens))
        assert statistics.fmean(machine.gaps[4:]) == pytest.approx(
            0.1 * (1 + 0.5 * counted), rel=0.15
        )


def test_where_all_steps_link_some_are_kept_free_to_be_measured():
    """So that it is noticed when more decode, who make every step longer."""
    machine = Machine(0.1, computed=1e-3, fixed=0.0)
    machine.step()
    for plain in (0.1, 0.4):
        machine.plain = plain
        for _ in range(4 * (MEASURED_EVERY + PAUSE)):
            machine.step(StepWork(0, machine.throttle.tokens))
    assert machine.throttle.target_seconds == pytest.approx(1.5 * 0.4)


def test_placing_is_learnt_where_nothing_is_computed():
    """A slice of it, too, takes as long as the rest of its step."""
    machine = Machine(0.1, placed=1e-4)
    machine.step()
    for _ in range(15):
        machine.step(StepWork(int(machine.throttle.tokens * machine.throttle.placed_per_computed)))
        while machine.throttle.tokens == 0:
            machine.step()
        machine.step()
    assert machine.throttle.tokens * machine.throttle.placed_per_computed == pytest.approx(
        1000, rel=0.1
    )


def test_who_is_alone_is_not_spared():
    """Nor does it teach anything."""
    machine = Machine()
    for _ in range(5):
        machine.step()
    machine.step(StepWork(0, 16))
    machine.step()
    before = machine.throttle.tokens, machine.throttle.placed_per_computed
    for _ in range(5):
        machine.step(StepWork(0, 5000, busy=False))
        machine.now += 100
    machine.step()
    assert (machine.throttle.tokens, machine.throttle.placed_per_computed) == before


def test_what_is_owed_is_limited():
    machine = Machine()
    for _ in range(3):
        machine.step()
    machine.step(StepWork(0, 10**6))
    for _ in range(2 * MOST_OWED):
        assert machine.throttle.tokens == 0
        machine.step()
    machine.step()
    assert machine.throttle.tokens == LEAST_TOKENS


def test_prefills_of_vllms_own_are_not_owed_by_linking():
    """Alone, they tell what a token costs; beside a slice, they are not taken for it."""
    machine = Machine(fixed=0.0)
    for _ in range(5):
        machine.step()
    machine.step(StepWork(prefilled=64))
    price = machine.throttle._computed_price
    assert price == pytest.approx(0.003)
    machine.step(StepWork(0, 16, prefilled=2000))
    assert machine.throttle._computed_price == price
    paused = 0
    while machine.throttle.tokens == 0:
        machine.step()
        paused += 1
    assert paused <= 4


def test_a_request_that_ends_spends_what_was_saved_for_it():
    machine = Machine()
    for _ in range(5):
        machine.step()
    machine.step(StepWork(prefilled=64))
    machine.throttle.idle()
    assert not machine.throttle.may_end(32)
    for _ in range(6):
        machine.step()
    assert not machine.throttle.may_end(32)
    machine.step()
    assert machine.throttle.may_end(32)
    machine.throttle.spend(32)
    assert not machine.throttle.may_end(32)
    for _ in range(20):
        machine.step()
    assert machine.throttle.may_end(10**6)
    machine.throttle.idle()
    assert not machine.throttle.may_end(1)


def test_more_neighbours_are_noticed():
    machine = Machine()
    for _ in range(30):
        machine.step()
    before = machine.throttle.tokens
    machine.step(StepWork(0, 16))
    machine.plain = 1.0
    for _ in range(50):
        machine.step()
    assert machine.throttle.tokens > 5 * before


def test_outputs_without_a_step_are_ignored():
    throttle = TransferThrottle(100, clock=lambda: 1.0)
    throttle.note_end()
    assert throttle.tokens == LEAST_TOKENS
