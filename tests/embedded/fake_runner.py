"""A scheduler with the engine's own loop, over a runner without a model: slots remember which tokens lie in them."""

import contextlib
from functools import partial
from itertools import count

import numpy as np
import torch

from kvlinker.embedded.batch import StepResult
from kvlinker.embedded.loop import EngineLoop
from kvlinker.embedded.requests import Kind, Request
from kvlinker.embedded.scheduler import Scheduler
from kvlinker.embedded.sequence import SequenceSlots, TokenSequence
from kvlinker.linking.plan import Placement
from kvlinker.store import LayerKV
from kvlinker.store.loading.arriving import ArrivingKV

LAYERS = 3
LAYER = LayerKV(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
_names = count(1)


class Work(Request):
    """Wants so many tokens, and notes how it was told of its end."""

    def __init__(self, length=10, output=1, *, kind=Kind.ANSWER, n=1, runs=None, identity=None, urgent=False):
        super().__init__()
        self.kind, self.identity, self.urgent = kind, identity, urgent
        self.name = next(_names)
        self.length, self.output, self.runs = length, output, runs or [(0, length)]
        self.told, self.lost, self.started = [], 0, 0
        self.unforked = []
        if kind is not Kind.ANSWER:
            self.sequence = self.make_sequence()
        if n > 1:
            self.unforked = [Work(length, output) for _ in range(n - 1)]
            for choice, work in enumerate(self.all_choices()):
                work.choice, work.choices = choice, self.all_choices()

    def all_choices(self):
        return [self, *self.unforked]

    def make_sequence(self, *kvs):
        """The sequence, with as many tokens placed as ``kvs`` have."""
        placements, start = [], 0
        for kv in kvs:
            placements.append((Placement(None, start, 0, kv.tokens, start), kv))
            start += kv.tokens
        tokens = self.name * 1000 + np.arange(self.length)
        runs = [(start, self.length)] if kvs else self.runs
        return TokenSequence(tokens, runs, placements=placements, most_tokens=self.length + self.output)

    def fork(self):
        forks, self.unforked = self.unforked, []
        for work in forks:
            work.sequence = self.sequence.fork()
        return forks

    def mark_started(self):
        self.started += 1

    def lose(self):
        self.sequence, self.lost = None, self.lost + 1

    def advance(self, logits):
        self.output -= 1
        if self.output <= 0:
            return partial(self.told.append, "finished")
        self.sequence.append(self.name * 1000 + 500 + self.output)
        return None

    def cancel(self):
        self._tell("cancelled")

    def fail(self, error):
        self._tell("failed")

    def _tell(self, how):
        for work in self.all_choices():
            work.told.append(how)


class FakeRunner:
    """Computes nothing, and notes whose KV does not lie where it should when its logits are wanted."""

    def __init__(self, slots):
        self.slots = np.full(slots, -1)
        self.pool = self
        self.steps = []
        self.moved = 0
        self.misplaced = []

    def move(self, source, target, size):
        self.moved += 1
        self.slots[target : target + size] = self.slots[source : source + size].copy()

    def step(self, batch, wait):
        self.steps.append(batch)
        left = {}
        for placed in batch.placed:
            if isinstance(placed.kv, ArrivingKV) and not placed.kv.complete:
                left[placed.owner] = min(placed.kv.delivered, left.get(placed.owner, LAYERS))
            else:
                position = placed.slot - placed.owner.held.start
                tokens = placed.owner.tokens[position : position + placed.tokens]
                self.slots[placed.slot : placed.slot + placed.tokens] = tokens
        for run in batch.runs:
            if run.owner not in left:
                self.slots[run.slot + run.start : run.slot + run.end] = run.tokens
        logits = {}
        for run in batch.runs:
            if run.wants_logits and run.owner not in left:
                held = self.slots[run.slot : run.slot + run.owner.length]
                if (held != run.owner.tokens).any():
                    self.misplaced.append(run.owner)
                logits[run.owner] = torch.zeros(1)
        return StepResult(logits, left)


class NoThroughput:
    """Predicts nothing."""

    def note(self, batch, seconds):
        """Forget it."""


class Simulation:
    """Takes steps when the test says so, and has KV come when the test says so."""

    def __init__(self, slots, *, max_step_tokens=16, max_running=8, max_waiting=1000):
        self.loads = []
        self.slots = SequenceSlots(slots)
        self.scheduler = Scheduler(
            self.slots,
            self.loads.append,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
        )
        self.max_step_tokens = max_step_tokens
        self.runner = FakeRunner(slots)
        self.loop = EngineLoop(self.scheduler, self.runner, NoThroughput(), computing=contextlib.nullcontext)

    def enter(self, *args, **options):
        """Work whose KV is not there yet."""
        return self.scheduler.enter(Work(*args, **options))

    def add(self, *args, **options):
        """Work whose KV is there, too."""
        work = self.enter(*args, **options)
        self.load_all()
        return work

    def load(self, work, *kvs):
        self.loads.remove(work)
        self.scheduler.loaded(work, work.make_sequence(*kvs))

    def load_all(self):
        while self.loads:
            self.load(self.loads[0])

    def step(self):
        """The batch that was computed, if there was one."""
        before = len(self.runner.steps)
        self.loop._turn()
        self.scheduler.check_integrity()
        assert not self.runner.misplaced, "KV lost or misplaced"
        if len(self.runner.steps) == before:
            return None
        batch = self.runner.steps[-1]
        assert len(batch.tokens) <= self.max_step_tokens
        return batch

    def run(self):
        for _ in range(20_000):
            if self.step() is None:
                return
        raise AssertionError("no end")


def arriving(tokens, delivered=0):
    """KV of a chunk whose first layers are there."""
    kv = ArrivingKV(layer_count=LAYERS, tokens=tokens, nbytes=1)
    for _ in range(delivered):
        kv.deliver(LAYER)
    return kv
