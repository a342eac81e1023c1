"""Scheduling without a model: what is computed when, and who holds the slots."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlinker.embedded.pool import SlotAllocator
from kvlinker.embedded.scheduler import Scheduler
from kvlinker.embedded.sequence import Sequence


def sequence(length=10, runs=None, most=None):
    runs = [(0, length)] if runs is None else runs
    return Sequence(np.arange(length), runs, most_tokens=most or length + 20)


class Simulation:
    """Drives a scheduler like the engine does, with a pool that remembers which position each slot holds."""

    def __init__(self, slots, *, max_step_tokens=16, max_running=8):
        self.slots = np.full(slots, -1)
        self.allocator = SlotAllocator(slots)
        self.scheduler = Scheduler(self.allocator, self.move, max_step_tokens=max_step_tokens, max_running=max_running)
        self.max_step_tokens = max_step_tokens
        self.finished = []
        self.wanted = {}

    def move(self, source, target, size):
        self.slots[target : target + size] = self.slots[source : source + size].copy()

    def add(self, added, output):
        self.wanted[added] = output
        self.scheduler.add(added)

    def step(self):
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            return None
        assert len(step.batch.tokens) <= self.max_step_tokens
        for run in step.batch.runs:
            self.slots[run.slot + run.start : run.slot + run.end] = run.tokens
        for done in step.sequences:
            if done.computed:
                self.advance(done)
        return step

    def advance(self, done):
        start = done.held.start
        assert (self.slots[start : start + done.length] == done.tokens).all(), "KV lost or misplaced"
        self.wanted[done] -= 1
        if self.wanted[done] <= 0:
            self.scheduler.remove(done)
            self.finished.append(done)
        else:
            done.append(done.length + 1000)

    def run(self):
        while self.step() is not None:
            pass


def test_long_prefills_are_cut_at_the_budget():
    simulation = Simulation(100, max_step_tokens=7)
    long = sequence(24)
    simulation.add(long, 1)
    sizes = [len(simulation.step().batch.tokens) for _ in range(4)]
    assert sizes == [7, 7, 7, 3]
    assert simulation.finished == [long]


def test_decoding_comes_before_prefill():
    simulation = Simulation(200, max_step_tokens=5)
    decoding = sequence(3, most=60)
    simulation.add(decoding, 50)
    simulation.step()
    simulation.add(sequence(40), 1)
    for _ in range(5):
        step = simulation.step()
        assert step.sequences[0] is decoding
        assert len(step.batch.tokens) == 5


def test_requests_are_admitted_in_order_and_only_as_slots_allow():
    simulation = Simulation(50, max_step_tokens=100)
    for _ in range(3):
        simulation.add(sequence(20, most=21), 2)
    simulation.step()
    assert (simulation.scheduler.running, simulation.scheduler.waiting) == (2, 1)


def test_a_linked_sequence_computes_only_its_runs():
    simulation = Simulation(100)
    linked = sequence(30, runs=[(4, 6), (20, 23), (28, 30)])
    simulation.add(linked, 0)
    simulation.slots[:30] = np.arange(30)
    step = simulation.step()
    assert [(run.start, run.end) for run in step.batch.runs] == [(4, 6), (20, 23), (28, 30)]
    assert [run.wants_logits for run in step.batch.runs] == [False, False, True]


def test_removing_frees_at_once_running_or_waiting():
    simulation = Simulation(30, max_step_tokens=4)
    running, waiting = sequence(20), sequence(20)
    simulation.add(running, 1)
    simulation.add(waiting, 1)
    simulation.step()
    simulation.scheduler.remove(waiting)
    simulation.scheduler.remove(running)
    simulation.scheduler.remove(running)
    assert simulation.allocator.used == 0
    assert simulation.step() is None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=8),
    st.integers(130, 300),
    st.integers(1, 40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_everything_finishes_and_no_kv_is_lost(requests, slots, budget, max_running, random):
    simulation = Simulation(slots, max_step_tokens=budget, max_running=max_running)
    pending = [(sequence(length, most=length + output), output) for length, output in requests]
    cancelled = set()
    steps = 0
    while len(simulation.finished) + len(cancelled) < len(requests):
        if pending and random.random() < 0.3:
            simulation.add(*pending.pop())
        elif random.random() < 0.02 and len(simulation.wanted) > len(simulation.finished) + len(cancelled):
            victim = random.choice([s for s in simulation.wanted if s not in simulation.finished])
            simulation.scheduler.remove(victim)
            cancelled.add(victim)
        simulation.step()
        steps += 1
        assert steps < 20_000, "no progress"
    assert simulation.allocator.used == 0
