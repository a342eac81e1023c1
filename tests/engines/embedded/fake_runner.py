"""A scheduler with the engine's own loop, over a runner without a model: slots remember which
tokens lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kvlinker.base.events import Events
from kvlinker.engines.contract.cost import CostModel
from kvlinker.engines.embedded.execution.batch import Batch, Run, SharedChunk, StepResult
from kvlinker.engines.embedded.execution.late_layers import WaitInStep, never_wait
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.loop import EngineLoop
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.engines.embedded.requests.sequence import Refining, SequenceSlots, TokenSequence
from kvlinker.engines.embedded.scheduling.composition import LayeredPieces, StepComposer
from kvlinker.engines.embedded.scheduling.queues import Admission
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.engines.embedded.scheduling.throughput import ComputeThroughput, TokenCost
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import Range
from kvlinker.store import HostTier, LayerKV, Speeds
from kvlinker.store.chunk_store import Holds
from kvlinker.store.loading.arriving import ArrivingKV

LAYERS = 3
PIECE_LAYERS = 40
"""The layers that a piece of a prompt is computed by."""

CHUNK_BYTES = 4
LAYER = LayerKV(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
NOTHING_DROPPED = SimpleNamespace(dropped=(), error=None)
"""What stands for a refinement that keeps all tokens."""
_names = count(1)


class Work(Request):
    """Wants so many tokens, and notes how it was told of its end."""

    kind = ResultKind.ANSWER

    def __init__(
        self,
        length=10,
        output=1,
        *,
        n=1,
        runs=None,
        identity=None,
        urgent=False,
        chunks="",
        tenant="",
        workflow=None,
        refines=False,
    ):
        """``chunks`` are the keys, a character each, of what it keeps in memory. With ``refines``,
        its prompt is indivisible."""
        super().__init__()
        self.chunk_bytes = dict.fromkeys(chunks, CHUNK_BYTES)
        self.tenant, self.workflow, self.refines = tenant, workflow, refines
        self.identity, self.urgent = identity, urgent
        self.name = next(_names)
        self.length, self.output, self.runs = length, output, runs or [(0, length)]
        self.told: list[str] = []
        self.lost, self.started = 0, 0
        self.unforked: list[Work] = []
        if n > 1:
            self.unforked = [
                Work(length, output, tenant=tenant, workflow=workflow) for _ in range(n - 1)
            ]
            for choice, work in enumerate(self.all_choices()):
                work.choice, work.choices = choice, self.all_choices()

    @property
    def pending(self):
        return self.runs if self.sequence is None else self.sequence.pending

    def all_choices(self):
        return [self, *self.unforked]

    def make_sequence(self, *kvs):
        """The sequence, whose first tokens are those of ``kvs``."""
        tokens = self.name * 1000 + np.arange(self.length)
        shared, start = [], 0
        for kv in kvs:
            shared.append(SharedChunk(kv, start, start, 0, kv.tokens))
            start += kv.tokens
        runs = [(start, self.length)] if kvs else self.runs
        refine = (
            (lambda: Refining(cast(Refinement, NOTHING_DROPPED), None)) if self.refines else None
        )
        return TokenSequence(
            tokens, runs, shared=shared, most_tokens=self.length + self.output, refine=refine
        )

    def fork(self):
        assert self.sequence is not None
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
        assert self.sequence is not None
        self.sequence.append(self.name * 1000 + 500 + self.output)
        return None

    def cancel(self):
        self._tell("cancelled")

    def fail(self, error):
        self._tell("failed")

    def _tell(self, how):
        for work in self.all_choices():
            work.told.append(how)


class ChunkWork(Work):
    """Computes a chunk: nothing has to be loaded before it."""

    kind = ResultKind.CHUNK

    def __init__(self, length, *, identity=None, urgent=False, tenant=""):
        super().__init__(length, identity=identity, urgent=urgent, tenant=tenant)
        self.sequence = self.make_sequence()


class VariantWork(ChunkWork):
    """Computes a variant of a chunk: nothing has to be loaded before it, either."""

    kind = ResultKind.VARIANT


class BackgroundWork(ChunkWork):
    """Is computed only while there is nothing else."""

    kind = ResultKind.BACKGROUND


class FakePool(KVPool):
    """Holds no KV, but the tokens whose KV would lie in its slots: [slots], -1 where nothing
    does."""

    def __init__(self, slots: int) -> None:
        super().__init__([], slots, dtype=torch.float32, device=torch.device("cpu"))
        self.tokens = np.full(slots, -1)


class FakeRunner(Runner):
    """Computes nothing, and notes whose KV does not lie where it should when its logits are
    wanted."""

    def __init__(self, slots: int, timing: Timing) -> None:
        """Make a pool of so many ``slots``; whatever else a runner has needs a model, and there is
        none."""
        self.pool: FakePool = FakePool(slots)
        self.timing = timing
        self.steps: list[Batch] = []
        self.misplaced: list[TokenSequence] = []
        self.pieces: list[Batch] = []
        """Of which all layers were computed."""

        self.begun: tuple[Batch, int] | None = None
        """The piece of which some layers are computed, and how many."""

        self.begun_seconds = 0.0

    def accepts_layers(self, batch: Batch) -> bool:
        return batch.is_plain and not batch.captured

    def compute_layers(self, batch: Batch, until: float) -> tuple[StepResult, float] | None:
        if self.begun is None or self.begun[0] is not batch:
            self.begun, self.begun_seconds = (batch, 0), 0.0
        done = self.begun[1]
        while True:
            done += 1
            taken = self.timing.compute_layer(batch)
            self.begun_seconds += taken
            if done == PIECE_LAYERS:
                break
            if self.timing.now + taken / 2 > until:
                self.begun = batch, done
                return None
        self.begun = None
        self.pieces.append(batch)
        return self._result(batch), self.begun_seconds

    def drop_layers(self) -> None:
        self.begun = None

    def step(self, batch: Batch, wait: WaitInStep = never_wait) -> StepResult:
        self.steps.append(batch)
        self.timing.compute(batch)
        return self._result(batch)

    def _result(self, batch: Batch) -> StepResult:
        slots = self.pool.tokens
        left: dict[object, int] = {}
        for owner, chunk in batch.shared:
            if isinstance(chunk.kv, ArrivingKV) and not chunk.kv.complete:
                left[owner] = min(chunk.kv.delivered, left.get(owner, LAYERS))
        for run in batch.runs:
            if run.owner not in left:
                slots[run.slots] = run.tokens
        logits: dict[object, Tensor] = {}
        for run in batch.runs:
            if run.wants_logits and run.owner not in left:
                owner, visible = owner_of(run), batch.visible_kv[run.owner]
                held = np.concatenate([slots[slot : slot + count] for slot, count in visible.spans])
                if (held != owner.tokens[visible.positions]).any() or visible.positions[
                    -1
                ] != owner.length - 1:
                    self.misplaced.append(owner)
                logits[owner] = torch.zeros(1)
        return StepResult(logits, left, {})


def owner_of(entry: Run) -> TokenSequence:
    """Return the sequence that a part of a batch belongs to."""
    assert isinstance(entry.owner, TokenSequence)
    return entry.owner


class FakeCost(CostModel):
    """Counts so many operations per token and pair."""

    per_token = 1.0
    per_pair = 0.001

    def __init__(self) -> None:
        """Skip the counting of weights: there is no model."""


@dataclass
class Timing:
    """A clock that computing moves on, by what steps are said to take: ``constant``, and so much
    per token and pair; prompts take ``strain`` times as long beside decoding."""

    constant: float = 0.1
    per_token: float = 0.01
    per_pair: float = 1e-5
    per_read: float = 1e-6
    strain: float = 1.0
    now: float = 1000.0
    taken: list[float] = field(default_factory=list)
    """The seconds of all steps so far."""

    def compute(self, batch: Batch) -> None:
        """Let the time pass that the step takes."""
        cost = TokenCost(self.per_token, self.per_pair)
        beside = TokenCost(self.strain * self.per_token, self.strain * self.per_pair, self.per_read)
        prompts: dict[object, list[Range]] = {}
        for run in batch.runs:
            if not decodes(run):
                prompts.setdefault(run.owner, []).append((run.start, run.end))
        decoded = [(run.start, run.end) for run in batch.runs if decodes(run)]
        seconds = cost.of(decoded) + sum(
            (beside if decoded else cost).of(ranges) for ranges in prompts.values()
        )
        self.taken.append(self.constant + seconds)
        self.now += self.taken[-1]

    def compute_layer(self, batch: Batch) -> float:
        """Let the time pass that a layer of a piece of a prompt takes, and return it."""
        beside = TokenCost(self.strain * self.per_token, self.strain * self.per_pair, self.per_read)
        cost = beside.of([(run.start, run.end) for run in batch.runs])
        taken = (self.constant + cost) / PIECE_LAYERS
        self.now += taken
        return taken

    def clock(self) -> float:
        return self.now


def decodes(run: Run) -> bool:
    """Tell whether a run is the last token of a request that decodes."""
    return run.wants_logits and len(run.tokens) == 1


class NoThroughput(ComputeThroughput):
    """Predicts nothing."""

    def __init__(self) -> None:
        """Skip what needs a model: there is none."""

    def note(self, batch: Batch, seconds: float) -> None:
        """Forget it."""

    def seconds(self, ranges: Sequence[Range]) -> float | None:
        return None

    cost_beside_decoding: TokenCost | None = None


class Simulation:
    """Takes steps when the test says so, and has KV come when the test says so.

    With a ``timing``, steps take that time, and the scheduler measures it; without one, it predicts
    nothing, and all happens at once.
    """

    def __init__(
        self,
        slots,
        *,
        max_step_tokens=16,
        max_running=8,
        max_waiting=1000,
        memory=0,
        timing=None,
        known=False,
        slo_ttft=None,
        seconds_per_token=None,
        resident="",
        piece_tokens=0,
    ):
        """``known`` says that the ``timing`` was measured before. ``resident`` are the keys of the
        chunks that are in memory whether they are held or not. ``piece_tokens`` are the most of a
        piece whose layers are computed apart; 0 for none."""
        self.loads: list[Work] = []
        self.slots = SequenceSlots(slots)
        self.holds = Holds([HostTier(memory, Events())])
        self.timing = timing or Timing(0, 0, 0)
        speeds = Speeds()
        if known:
            speeds.note("prefill model", [timing.per_token, timing.per_pair])
            speeds.note("decode model", [timing.constant])
            speeds.note("beside model", [1.0, timing.per_read])
        self.throughput = ComputeThroughput(FakeCost(), speeds) if timing else NoThroughput()
        self.runner = FakeRunner(slots, self.timing)
        self.scheduler = Scheduler(
            self.slots,
            self.note_load,
            hold=lambda request: self.holds.take(request.chunk_bytes),
            is_resident=lambda request: set(request.chunk_bytes) <= set(resident),
            admission=Admission(
                self.throughput.seconds,
                max_waiting=max_waiting,
                slo_ttft=slo_ttft,
                clock=self.timing.clock,
            ),
            composer=StepComposer(
                self.throughput,
                max_step_tokens=max_step_tokens,
                seconds_per_token=seconds_per_token,
                pieces=LayeredPieces(
                    self.throughput, self.runner.accepts_layers, token_limit=piece_tokens
                ),
            ),
            max_running=max_running,
        )
        self.max_step_tokens = max_step_tokens
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            self.throughput,
            clock=self.timing.clock,
        )

    def note_load(self, request: Request) -> None:
        """Note that the scheduler wants the KV of this work."""
        assert isinstance(request, Work)
        self.loads.append(request)

    def enter(self, *args, **options):
        """Work whose KV is not there yet."""
        return self.scheduler.enter(Work(*args, **options))

    def enter_chunk(self, length, **options):
        """A chunk to be computed."""
        return self.scheduler.enter(ChunkWork(length, **options))

    def enter_variant(self, length):
        """A variant to be computed."""
        return self.scheduler.enter(VariantWork(length))

    def enter_background(self, length):
        """Work for an engine that has nothing else to do."""
        return self.scheduler.enter(BackgroundWork(length))

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
        before, began = len(self.runner.steps), self.timing.now
        self.loop._turn()
        self.scheduler.check_integrity()
        assert not self.runner.misplaced, "KV lost or misplaced"
        if len(self.runner.steps) == before:
            return Batch((), {}) if self.timing.now > began else None
        batch = self.runner.steps[-1]
        indivisible = sum(len(run.tokens) for run in batch.runs if run.refinement is not None)
        assert len(batch.tokens) - indivisible <= self.max_step_tokens
        return batch

    def run(self):
        for _ in range(20_000):
            if self.step() is None:
                return
        raise AssertionError("no end")


def arriving(tokens, delivered=0):
    """KV of a chunk whose first layers are there."""
    kv = ArrivingKV(layer_count=LAYERS, tokens=tokens)
    for _ in range(delivered):
        kv.deliver(LAYER)
    return kv
