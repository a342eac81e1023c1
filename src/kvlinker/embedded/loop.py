"""The engine's thread: it steps through everybody's requests, and through the chunks that are to be computed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from kvlinker.embedded.admission import Admission
from kvlinker.embedded.captures import Captures
from kvlinker.embedded.commands import CommandQueue
from kvlinker.embedded.link_loading import LoadedLink
from kvlinker.embedded.linked_request import LinkedRequest
from kvlinker.embedded.runner import Runner
from kvlinker.embedded.scheduler import Scheduler, Step
from kvlinker.embedded.sequence import Sequence
from kvlinker.embedded.throughput import Pace
from kvlinker.engine.contract import GenerationRequest
from kvlinker.engine.limits import engine_closed
from kvlinker.engine.observation import QuestionProbe
from kvlinker.errors import EngineClosedError, KVLinkerError
from kvlinker.linking.link import Link, policy_failed
from kvlinker.linking.refinement import Refinement

logger = logging.getLogger(__name__)

Linked = Callable[[GenerationRequest, Link, Refinement | None], object]
"""Takes a request whose prompt has been computed, and by what. It runs in the engine's thread."""


class EngineLoop:
    """Runs commands and steps by turns, until it is closed or breaks; then whatever is under way fails.

    Its thread owns the scheduler, the runner and the requests' sequences, so these need no lock: other threads send
    it commands. ``submit``, ``cancel`` and ``close`` may be called from any of them, and take no lock but those inside
    the command queue and the admission.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        commands: CommandQueue,
        admission: Admission,
        captures: Captures,
        pace: Pace,
        *,
        layers: int,
        linked: Linked,
        computing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``layers``: of the model. ``pace``: is told how fast steps are. ``linked``: is told of every request once.
        ``computing``: is entered for each step."""
        self._scheduler = scheduler
        self._runner = runner
        self._commands = commands
        self._admission = admission
        self._captures = captures
        self._pace = pace
        self._layers = layers
        self._linked = linked
        self._computing = computing
        self._requests: dict[Sequence, LinkedRequest] = {}  # the engine thread's
        self._thread = threading.Thread(target=self._loop, name="kvlinker-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        return not self._commands.closed and self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: LinkedRequest) -> None:
        """Serve the request once its chunks' KV is there. Raises OverloadedError and EngineClosedError."""
        self._admission.admit(request, self._queue)

    def cancel(self, request: LinkedRequest) -> None:
        """End the request, unless it has ended."""
        with contextlib.suppress(EngineClosedError):  # closing ends it anyway
            self._commands.put(partial(self._cancel, request))

    def close(self) -> None:
        """Stop after the step that is under way, and wait until all requests have failed. Idempotent."""
        self._commands.close()
        self._thread.join()

    def _queue(self, request: LinkedRequest, link: LoadedLink) -> None:
        """All chunks' KV is there: hand the request to the engine's thread. Runs in a loader, as a rule."""
        sequence = request.make_sequence(link, layers=self._layers)
        self._commands.put(partial(self._enter, request, link.link, sequence))
        if link.link.policy.needs.variants and not request.explains:
            self._captures.offer(link.link.prompt, request.request.tenant)

    def _enter(self, request: LinkedRequest, link: Link, sequence: Sequence) -> None:
        if self._admission.take(request):
            request.mark_loaded(link, sequence)
            self._requests[sequence] = request
            self._scheduler.add(sequence)

    def _cancel(self, request: LinkedRequest) -> None:
        if self._admission.take(request):
            request.cancel()
        elif request.sequence is not None and request.sequence in self._requests:
            self._drop(request.sequence)
            request.cancel()

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            logger.exception("The engine failed; its requests are given up.")
        finally:
            self._commands.close()
            self._fail_all(engine_closed())

    def _turn(self) -> bool:
        """Run the commands that came, and a step if there is one; False when the engine closes."""
        self._admission.proceed()
        if not self._commands.wait(lambda: not self._scheduler.idle or self._captures.variants_wait):
            return False
        while (command := self._commands.next()) is not None:
            command()
        if self._scheduler.idle:
            self._captures.start_variants()
        step = self._scheduler.schedule()
        if step is not None:
            self._run(step)
        return True

    def _run(self, step: Step) -> None:
        for sequence in step.sequences:
            if sequence in self._requests:
                self._requests[sequence].mark_started()
        begin = time.perf_counter()
        try:
            with self._computing():
                logits = self._runner.step(step.batch)
        except Exception as error:
            logger.exception("A step failed; its requests are given up.")
            for sequence in step.sequences:
                self._give_up(sequence, KVLinkerError(f"The model failed on this request: {type(error).__name__}."))
            return
        self._pace.note(step.batch, time.perf_counter() - begin)
        computed = [sequence for sequence in step.sequences if sequence.computed]
        rows = iter(logits)
        lost = [sequence for sequence in step.sequences if sequence.lost]
        for sequence in lost:
            self._load_again(sequence)
        self._give_up_failed_policies(step)
        for sequence in computed:
            if sequence.capture is not None:
                self._captures.finish(sequence)
            elif sequence.probe is not None:
                if sequence in self._requests:
                    self._relink(sequence, sequence.probe)
            else:
                row = next(rows)
                if sequence in self._requests:
                    self._advance(sequence, row)

    def _load_again(self, sequence: Sequence) -> None:
        """A chunk's KV did not come after all."""
        request = self._requests[sequence]
        self._drop(sequence)
        request.mark_lost()
        self._admission.admit_again(request, self._queue)

    def _relink(self, sequence: Sequence, probe: QuestionProbe) -> None:
        try:
            self._requests[sequence].relink(probe, layers=self._layers)
        except Exception as error:
            self._give_up_policy(sequence, error)

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        request = self._requests[sequence]
        if (link := request.linked()) is not None:
            self._linked(request.request, link, sequence.refinement)
        try:
            request.accept(logits)
        except Exception as error:
            logger.exception("Sampling failed; the request is given up.")
            self._give_up(sequence, KVLinkerError(f"Sampling failed: {error}"))
            return
        if request.ended or request.cancelled:
            self._drop(sequence)
            request.cancel()

    def _drop(self, sequence: Sequence) -> None:
        del self._requests[sequence]
        self._scheduler.remove(sequence)

    def _give_up_failed_policies(self, step: Step) -> None:
        for sequence in step.sequences:
            if sequence in self._requests and sequence.refinement is not None and sequence.refinement.error is not None:
                self._give_up_policy(sequence, sequence.refinement.error)

    def _give_up_policy(self, sequence: Sequence, error: Exception) -> None:
        self._give_up(sequence, policy_failed(self._requests[sequence].request.policy, error))

    def _give_up(self, sequence: Sequence, error: KVLinkerError) -> None:
        if sequence in self._requests:
            request = self._requests[sequence]
            self._drop(sequence)
            request.fail(error)
        else:
            self._captures.fail(sequence, error)

    def _fail_all(self, error: KVLinkerError) -> None:
        while (command := self._commands.next()) is not None:
            try:
                command()
            except Exception:
                logger.exception("A command failed while the engine closes.")
        for sequence in [*self._requests, *self._captures.under_way]:
            self._give_up(sequence, error)
        self._admission.fail_all(error)
