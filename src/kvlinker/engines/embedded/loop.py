"""The engine's thread, which computes all requests step by step, and holds events for callers back
until the model computes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.contract import engine_closed
from kvlinker.engines.embedded.decoding.grammars import GrammarGuides
from kvlinker.engines.embedded.execution.batch import StepResult
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.requests.request import Ending, Request, RequestState
from kvlinker.engines.embedded.scheduling.composition import LayeredPiece, Step
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.engines.embedded.scheduling.throughput import ComputeThroughput
from kvlinker.store.loading.arriving import ArrivingKV

logger = logging.getLogger(__name__)

STEP_TIMES = 1024
"""The number of steps whose times are remembered."""


class StepTime(NamedTuple):
    """Says how long a step took: ``inside`` the model's forward pass, and ``outside``, where the
    step is composed before it, and tokens are chosen and told behind it."""

    requests: int
    tokens: int

    inside: float
    """Seconds by the clock."""

    outside: float
    """Seconds by the clock."""

    outside_cpu: float
    """Seconds in which the engine's thread was computing: without those in which it waited for
    other threads, or for a processor."""

    @property
    def share(self) -> float:
        """The part of the step outside of the model."""
        return self.outside / (self.inside + self.outside)


class Outbox:
    """Keeps calls of sinks, in order, until ``flush``.

    A caller that gets an event wakes up, and competes with the engine's thread for Python's lock.
    So callers get all tokens of a step at once, when the engine's thread is about to run the model,
    which needs the lock little, or not at all where native code computes the step.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._flushing = threading.RLock()
        self._owner: int | None = None

    def own(self) -> None:
        """Hold back the calls that this thread puts from now on: it promises to ``flush``. A call
        of another thread is made at once, after all that were held back."""
        self._owner = threading.get_ident()

    def disown(self) -> None:
        """Make all calls, and hold none back any more."""
        self._owner = None
        self.flush()

    def put(self, call: Callable[[], None]) -> None:
        """Make the call, which raises nothing, at the next ``flush``; at once in a thread that does
        not own the box."""
        self._calls.append(call)
        if threading.get_ident() != self._owner:
            self.flush()

    def flush(self) -> None:
        """Make all calls that were held back. Any thread may call it."""
        while self._calls:
            with self._flushing:
                if self._calls:
                    self._calls.popleft()()


class EngineLoop:
    """Runs steps until it is closed or fails; then all unfinished requests fail.

    Its thread owns the runner and the requests' sequences. It alone ends requests whose KV is
    there. Their events come from it, or from a thread that has an event of another request, but
    always one after the other, in order.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        throughput: ComputeThroughput,
        *,
        guides: GrammarGuides | None = None,
        idle: threading.Event | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``throughput`` gets the times of steps, by the ``clock``. ``guides`` compute the masks of
        grammars while the model computes. ``idle`` is cleared during forward passes."""
        self._scheduler = scheduler
        self._runner = runner
        self._throughput = throughput
        self._guides = guides
        self._idle = idle or threading.Event()
        self._clock = clock
        self.outbox = Outbox()
        """Keeps events for callers until the model is about to compute."""

        self.times: deque[StepTime] = deque(maxlen=STEP_TIMES)
        """How long the last steps took, in order."""

        self.sound = True
        """False once it has failed: what it has computed last may be anything."""

        self._thread = threading.Thread(target=self._loop, name="kvlinker-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        """True while the engine serves requests."""
        return not self._scheduler.closed and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the step that is under way, and wait until all requests have failed.
        Idempotent."""
        self._scheduler.close()
        self._thread.join()

    def _loop(self) -> None:
        self.outbox.own()
        try:
            while self._scheduler.wait(self.outbox.flush):
                self._turn()
        except Exception:
            logger.exception("The engine failed; its requests are given up.")
            self.sound = False
        finally:
            for request in self._scheduler.finish_all():
                _report(partial(request.fail, engine_closed()))
            self._runner.drop_layers()
            self.outbox.disown()

    def _turn(self) -> None:
        began, began_cpu = self._clock(), time.thread_time()
        self._report_cancelled()
        step = self._scheduler.next_step()
        self._drop_old_piece()
        if step is None:
            self.outbox.flush()
            return
        inside = self._run(step)
        self._drop_old_piece()
        if inside is not None:
            seconds, cpu = inside
            self.times.append(
                StepTime(
                    len(step.requests) + (step.piece is not None),
                    sum(len(run.tokens) for run in step.batch.runs),
                    seconds,
                    self._clock() - began - seconds,
                    time.thread_time() - began_cpu - cpu,
                )
            )

    def _run(self, step: Step) -> tuple[float, float] | None:
        """Compute a step, and go on with its requests. Returns the seconds of the forward passes,
        by the clock and of this thread; None where one failed."""
        working = (*step.requests, *(() if step.piece is None else (step.piece.request,)))
        for request in working:
            request.mark_started()
        for _, chunk in step.batch.shared:
            if isinstance(chunk.kv, ArrivingKV) and not chunk.kv.complete:
                chunk.kv.subscribe(self._scheduler.wake)
        if self._guides is not None and self._guides.postponed:
            self._guides.start()
        self.outbox.flush()
        begin, begin_cpu = self._clock(), time.thread_time()
        result = StepResult({}, {}, {})
        computing = step.requests
        self._idle.clear()
        try:
            if step.batch.runs:
                result = self._runner.step(step.batch, self._scheduler.wait_in_step)
                if result.is_usual:
                    self._throughput.note(step.batch, self._clock() - begin)
            if step.piece is not None:
                computing = (step.piece.request,)
                result = self._with_layers(step.piece, begin + step.seconds, result)
        except Exception as error:
            logger.exception("A step failed; its requests are given up.")
            for request in computing:
                failed = KVLinkerError(f"The model failed on this request: {type(error).__name__}.")
                self._end(request, self._failure(request, failed))
            if computing is step.requests:
                return None
        finally:
            self._idle.set()
        seconds, cpu = self._clock() - begin, time.thread_time() - begin_cpu
        self._restart_late(step, result)
        for request in working:  # before any ends: its KV goes with its state
            if request.sequence in result.states:
                request.sequence.reach(result.states[request.sequence])
        self._report_cancelled()
        for request in working:
            if request.state is RequestState.RUNNING:
                self._advance_request(request, result)
        return seconds, cpu

    def _with_layers(self, piece: LayeredPiece, until: float, result: StepResult) -> StepResult:
        """Compute layers of a piece of a prompt until then, and return the step's result with that
        of the piece, once all are computed."""
        done = self._runner.compute_layers(piece.batch, until)
        if done is None:
            return result
        found, seconds = done
        self._throughput.note_piece(piece.batch, seconds)
        self._scheduler.finish_piece(piece)
        return replace(result, logits=result.logits | found.logits)

    def _drop_old_piece(self) -> None:
        """Drop the runner's layers of a piece whose request has ended or lost its slots."""
        if self._scheduler.piece is None:
            self._runner.drop_layers()

    def _restart_late(self, step: Step, result: StepResult) -> None:
        """Restart the requests that left the step later. To be called before any request ends: KV
        that is not there in all layers must not be kept for others."""
        for request in step.requests:
            if request.sequence in result.late:
                self._scheduler.restart_later(request, result.late[request.sequence])

    def _advance_request(self, request: Request, result: StepResult) -> None:
        """Process a request's part of the step's result: it advances if all of its tokens are
        computed."""
        sequence = request.sequence
        assert sequence is not None
        if not sequence.computed:
            self._scheduler.keep_beginning(request)
        if sequence.computed:
            logits = result.logits.get(sequence)
            if (
                logits is not None
                and sequence.length == sequence.prompt_length
                and not bool(logits.isnan().any())  # else all that begin alike would fail, too
            ):
                self._scheduler.keep(request)
            forks = () if logits is None else request.fork()
            ending = self._advanced(request, logits)
            for fork in forks:
                ends = self._advanced(fork, logits)
                self._scheduler.fork(fork, request)
                self._end(fork, ends)
            self._end(request, ending)

    def _advanced(self, request: Request, logits: Tensor | None) -> Ending | None:
        """Advance the request; if that raises, return an ending that reports the failure."""
        try:
            return request.advance(logits)
        except KVLinkerError as error:
            return self._failure(request, error)
        except Exception as error:
            logger.exception("A request failed after its step; it is given up.")
            return self._failure(request, KVLinkerError(f"The request failed: {error}"))

    def _failure(self, request: Request, error: KVLinkerError) -> Ending:
        if request.sequence is not None:
            # NaN in a slot would reach whoever gets it next, even where it is hidden.
            self._runner.pool.clear(self._scheduler.exclusive_slots(request))
            request.sequence.restart()  # so that no other choice takes its KV over
        return partial(request.fail, error)

    def _end(self, request: Request, ending: Ending | None) -> None:
        if ending is not None and self._scheduler.finish(request):
            _report(ending)

    def _report_cancelled(self) -> None:
        for request in self._scheduler.end_cancelled():
            _report(request.cancel)


def _report(ending: Ending) -> None:
    """Call the ending; an error in it is logged, since it concerns one caller, and the thread
    serves all."""
    try:
        ending()
    except Exception:
        logger.exception("A request has ended, but its caller could not be told.")
