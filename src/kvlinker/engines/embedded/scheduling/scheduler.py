"""Continuous batching: the state machine of all requests, from their arrival to their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.limits import engine_closed
from kvlinker.engines.embedded.requests.request import Request, RequestState, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.engines.embedded.scheduling.admission import Admission
from kvlinker.engines.embedded.scheduling.composition import Step, StepComposer, sequence_of
from kvlinker.engines.embedded.scheduling.fetching import FetchQueue
from kvlinker.engines.embedded.scheduling.layered_pieces import LayeredPiece
from kvlinker.engines.embedded.scheduling.lines import latest_first
from kvlinker.engines.embedded.scheduling.queues import RequestQueues
from kvlinker.engines.embedded.scheduling.running import RunningRequests
from kvlinker.engines.embedded.scheduling.slots import SequenceSlots
from kvlinker.engines.embedded.scheduling.turn_queue import TurnQueue
from kvlinker.linking.policy import Policy
from kvlinker.prompting.segments import Prompt, ReusedPrefix
from kvlinker.store.chunk_store import Hold

logger = logging.getLogger(__name__)

MOST_VARIANTS = 4
"""The most variants that wait for an idle engine; older ones are dropped."""

MOST_RESTARTS = 1
"""The number of times that a request that left a step may begin again before all layers of its
chunks have arrived."""

NEXT_STATES = {
    RequestState.LOADING: {RequestState.READY, RequestState.FINISHED},
    RequestState.READY: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.LOADING, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.FINISHED: set[RequestState](),
}

R = TypeVar("R", bound=Request)


class Scheduler(RequestQueues):
    """Owns every request from its arrival to its end, and moves it from state to state.

    **Loading.** A few requests at a time have their chunks' KV fetched (``FetchQueue``), in the
    order of ``Admission``.

    **Running.** Requests get slots in that order (``RunningRequests``), and ``StepComposer`` fills
    the steps.

    **Choices.** The answers to one prompt share its slots, or take over the slots of one that has
    ended.

    All methods hold the queues' one lock, for a short time, and call only the constructor's
    functions under it; ``closed``, ``preemptions`` and ``piece`` are read without it. ``wait`` and
    the methods below are for the engine's thread only, but for ``find_prefix`` and
    ``expect_prefix``.
    """

    def __init__(
        self,
        slots: SequenceSlots,
        load: Callable[[Request], object],
        *,
        hold: Callable[[Request], Hold | None],
        is_resident: Callable[[Request], bool],
        admission: Admission,
        composer: StepComposer,
        max_running: int,
    ) -> None:
        """``load`` starts fetching a request's KV in another thread, which calls ``loaded`` or
        ``failed`` later; ``hold`` makes room in memory for it before, or returns None if there is
        none now; ``is_resident`` returns whether all of its chunks are in memory. ``max_running``
        is the most requests that hold slots."""
        waiting = {kind: TurnQueue() for kind in ResultKind}
        super().__init__(
            admission,
            FetchQueue(admission, load, hold=hold, is_resident=is_resident),
            waiting,
            RunningRequests(slots, admission, waiting, self._move, max_running=max_running),
        )
        self._composer = composer
        self._arrived = 0
        self._in_step: frozenset[Request] = frozenset()
        self._cancelled: set[Request] = set()

    def has_unfinished(self, identity: object) -> bool:
        """Return whether a request with that identity is under way."""
        with self._lock:
            return identity in self._by_identity

    def enter(self, request: R) -> R:
        """Accept the request, or return the unfinished one with the same identity, which hurries if
        the request does.

        Raises OverloadedError for an answer when too many wait, and EngineClosedError.
        """
        with self._lock:
            if self.closed:
                raise engine_closed()
            twin = self._by_identity.get(request.identity)
            if twin is not None:
                if request.urgent and not twin.urgent:
                    self._admission.hurry(twin)
                    self._disorder(twin.kind)
                return cast(R, twin)
            self._arrived += 1
            request.number = self._arrived
            self._admission.place(request)
            if request.kind is ResultKind.ANSWER:
                share = self._composer.prompt_share
                self._admission.check(request, waiting=self._count_waiting(), prompt_share=share)
            self._admission.lines.add(request)
            self._push_back(request, request.seconds_left)
            if request.identity is not None:
                self._by_identity[request.identity] = request
            if request.sequence is None:
                self._fetches.unfetched.add(request)
                self._fetch_next()
            else:
                self._move(request, RequestState.READY)
            forgotten = self._waiting[ResultKind.VARIANT][MOST_VARIANTS:]
            for variant in forgotten:
                self._move(variant, RequestState.FINISHED)
        for variant in forgotten:
            variant.cancel()
        return request

    def loaded(self, request: Request, sequence: TokenSequence) -> bool:
        """Have the request, whose KV is there or arriving, wait for slots; return False, and do
        nothing, if it has ended meanwhile."""
        with self._lock:
            self._fetches.fetching.discard(request)
            takes = request.state is RequestState.LOADING
            if takes:
                expected, request.sequence = request.pending, sequence
                differs = tuple(request.pending) != tuple(expected)
                if differs and self._admission.predict_anew(request):
                    self._disorder(request.kind)
                self._move(request, RequestState.READY)
            self._fetch_next()
            return takes

    def failed(self, request: Request, error: KVLinkerError) -> None:
        """End the request with ``error``, since its KV cannot be had, unless it has ended."""
        with self._lock:
            self._fetches.fetching.discard(request)
            ends = request.state is RequestState.LOADING
            if ends:
                self._move(request, RequestState.FINISHED)
            self._fetch_next()
        if ends:
            request.fail(error)

    def cancel(self, requests: Collection[Request]) -> None:
        """Have the engine's thread end those that have not ended, before its next step."""
        with self._lock:
            self._cancelled.update(
                request for request in requests if request.state is not RequestState.FINISHED
            )
            self._lock.notify_all()

    def close(self) -> None:
        """Take no more requests; the engine's thread ends those that are here. Idempotent."""
        with self._lock:
            self.closed = True
            self._lock.notify_all()

    def wake(self) -> None:
        """Have the engine's thread check again whether there is something to do."""
        with self._lock:
            self._lock.notify_all()

    def wait(self, before: Callable[[], None]) -> bool:
        """Wait until there is something to compute or to cancel; False once the scheduler is
        closed. If there is nothing now, ``before`` is called first."""
        with self._lock:
            self._in_step = frozenset()
            if self._has_work():
                return not self.closed
        before()
        with self._lock:
            self._lock.wait_for(self._has_work)
            return not self.closed

    def _has_work(self) -> bool:
        return bool(
            self.closed or self._cancelled or self._running.requests or any(self._waiting.values())
        )

    def take_cancelled(self) -> list[Request]:
        """End the requests that were cancelled, and return them, so that their callers can be
        told."""
        with self._lock:
            leaving = latest_first(self._cancelled)
            ended = [request for request in leaving if self._finish(request)]
            self._cancelled.clear()
            return ended

    def finish_all(self) -> list[Request]:
        """End all requests, and return them, so that their callers can be told: also those that the
        failure which ends the engine has left in no sound state."""
        with self._lock:
            self.closed = True
            ended = []
            for request in list(self._everything()):
                try:
                    finished = self._finish(request)
                except Exception:
                    logger.exception("A request was not where its state says; it is given up.")
                    request.state, finished = RequestState.FINISHED, True
                if finished:
                    ended.append(request)
            return ended

    def next_step(self) -> Step | None:
        """Admit requests to slots, and return what to compute next; None where there is nothing."""
        with self._lock:
            self._running.grow()
            self._running.admit()
            step = self._composer.compose(self._running.requests)
            for request in step.requests:
                self._admission.note_progress(request)
            self._in_step = frozenset(step.requests)
            return None if step.is_empty else step

    def finish_piece(self, piece: LayeredPiece) -> None:
        """Mark the tokens of a piece of a prompt as done, all of whose layers are computed."""
        with self._lock:
            self._composer.pieces.finish(piece)
            self._admission.note_progress(piece.request)

    @property
    def piece(self) -> LayeredPiece | None:
        """The piece of a prompt of which some layers are computed, while its request runs."""
        return self._composer.pieces.piece

    def find_prefix(
        self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy
    ) -> ReusedPrefix | None:
        """Return the beginning of a prompt that requests have computed; see ``PrefixTree.find``."""
        with self._lock:
            return self._running.slots.prefixes.find(tenant, prompt, keys, policy)

    def expect_prefix(
        self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy, seconds: float
    ) -> None:
        """Expect a prompt that begins as this one; see ``PrefixTree.expect``."""
        with self._lock:
            self._running.slots.prefixes.expect(tenant, prompt, keys, policy, seconds)

    def keep(self, request: Request) -> None:
        """Keep what a request has computed so far for those that begin alike, while it goes on."""
        with self._lock:
            self._running.slots.keep(sequence_of(request))

    def keep_beginning(self, request: Request) -> None:
        """Keep what a request has computed of its prompt, which goes on to be computed, now and
        then; see ``SequenceSlots.keep_beginning``."""
        with self._lock:
            self._running.slots.keep_beginning(sequence_of(request))

    def leave_prefixes(self, seconds: float) -> None:
        """Leave the KV of prefixes to the next process, once no request is left; see
        ``PrefixTree.leave``."""
        with self._lock:
            self._running.slots.prefixes.leave(seconds)

    def slots_of_its_own(self, request: Request) -> NDArray[np.int64]:
        """Return the slots that only this request holds."""
        with self._lock:
            return self._running.slots.held_alone(sequence_of(request))

    def fork(self, choice: Request, first: Request) -> None:
        """Add another choice of a running request, whose prompt is computed."""
        with self._lock:
            choice.number, choice.arrived = first.number, first.arrived
            choice.began, choice.backlog = first.began, first.backlog
            choice.prompt_seconds = first.prompt_seconds
            choice.hold = None if first.hold is None else first.hold.share()
            self._admission.lines.add(choice)
            self._move(choice, RequestState.READY)

    def finish(self, request: Request) -> bool:
        """End the request, and free its slots; False if it has ended before."""
        with self._lock:
            return self._finish(request)

    def restart_later(self, request: Request, layer: int) -> None:
        """Take a request out of a step that lacked a chunk's ``layer``. It begins again once that
        layer and half of those behind it have arrived, at the second time once all have; if the
        layer is lost, the request is loaded again."""
        sequence = sequence_of(request)
        arriving = sequence.arriving
        with self._lock:
            sequence.restart()
            sequence.times_left += 1
            layers = max((kv.layer_count for kv in arriving), default=0)
            needed = (
                layers if sequence.times_left > MOST_RESTARTS else layer + 1 + (layers - layer) // 2
            )
            self._fetches.late[request] = min(needed, layers)
            self._move(request, RequestState.LOADING)
            self._admission.note_restart(request)
        for kv in arriving:
            kv.subscribe(partial(self._layers_came, request))
        self._layers_came(request)

    def wait_in_step(self, came: Callable[[], bool]) -> None:
        """Wait in the middle of a step, none of whose requests can go on, until ``came`` returns
        true or another request could run. Whatever makes ``came`` true has to call ``wake``; the
        store makes sure that layers arrive, or are lost, in time."""

        def others_could_run() -> bool:
            waiting = self._waiting[ResultKind.ANSWER] or self._waiting[ResultKind.CHUNK]
            running = (
                request
                for request in self._running.requests
                if request.kind is not ResultKind.BACKGROUND
            )
            return bool(self.closed or self._cancelled or waiting) or not self._in_step.issuperset(
                running
            )

        with self._lock:
            self._lock.wait_for(lambda: came() or others_could_run())

    def _move(self, request: Request, state: RequestState) -> None:
        """Move the request to another state. Nothing else changes states, or which requests hold
        slots."""
        if state not in NEXT_STATES[request.state]:
            raise RuntimeError(
                f"a request that is {request.state.value} cannot become {state.value}"
            )
        if request.state is RequestState.RUNNING:
            self._composer.pieces.drop(request)
            heir = self._heir(request) if state is RequestState.FINISHED else None
            self._running.remove(request, heir)
            if heir is not None:
                self._move(heir, RequestState.RUNNING)
        elif request.state is RequestState.LOADING:
            self._fetches.remove(request)
        else:
            self._waiting[request.kind].remove(request)
        request.state = state
        if state is RequestState.RUNNING:
            self._running.requests.append(request)
        elif state in (RequestState.READY, RequestState.PREEMPTED):
            self._waiting[request.kind].add(request)
        elif state is RequestState.FINISHED:
            self._by_identity.pop(request.identity, None)
            if request.hold is not None:
                request.hold.release()
                request.hold = None
            self._admission.lines.remove(request)
            if not self.closed:  # else nobody's turn comes any more
                self._push_back(request, -request.seconds_left)
        self._fetch_next()
        self._lock.notify_all()

    def _finish(self, request: Request) -> bool:
        if request.number is None or request.state is RequestState.FINISHED:
            return False
        self._move(request, RequestState.FINISHED)
        return True

    def _fetch_next(self) -> None:
        if not self.closed:
            self._fetches.start(self._waiting[ResultKind.ANSWER])

    def _push_back(self, request: Request, seconds: float) -> None:
        """Have those of its tenant that come after the request wait for so many seconds more, or
        less."""
        if self._admission.push_back(request, seconds):
            self._disorder(request.kind)

    def _layers_came(self, request: Request) -> None:
        """Make a request that left a step ready, if the layers that it waits for have arrived or
        are lost."""
        with self._lock:
            wanted = self._fetches.late.get(request)
            if wanted is None:
                return
            sequence = sequence_of(request)
            if sequence.lost:
                self._fetches.remove(request)
                request.lose()
                self._fetches.unfetched.add(request)
                self._fetch_next()
            elif all(kv.delivered >= wanted for kv in sequence.arriving):
                self._move(request, RequestState.READY)

    def _heir(self, request: Request) -> Request | None:
        """Return a waiting answer to the same prompt that can take over the slots of a request that
        ends; None if there is none."""
        if self.closed or not sequence_of(request).prompt_in_place:
            return None
        waiting = (
            choice
            for choice in request.choices
            if choice.state in (RequestState.READY, RequestState.PREEMPTED)
        )
        return next((choice for choice in waiting if choice not in self._cancelled), None)
