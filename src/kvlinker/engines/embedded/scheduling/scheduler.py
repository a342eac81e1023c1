"""Continuous batching: the state machine of all requests, from their arrival to their end."""

from __future__ import annotations

import logging
import math
import threading
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.contract import EngineLoad, engine_closed
from kvlinker.engines.embedded.requests.request import Request, RequestState, ResultKind
from kvlinker.engines.embedded.requests.sequence import SequenceSlots, TokenSequence
from kvlinker.engines.embedded.scheduling.composition import (
    LayeredPiece,
    Step,
    StepComposer,
    sequence_of,
)
from kvlinker.engines.embedded.scheduling.queues import (
    BY_ORDER,
    Admission,
    latest_first,
    yielding,
)
from kvlinker.linking.policy import Policy
from kvlinker.prompting.segments import Prompt, ReusedPrefix
from kvlinker.store.chunk_store import Hold

logger = logging.getLogger(__name__)

PREFETCH_LIMIT = 8
"""The number of waiting requests whose chunks' KV is fetched ahead of those after them; twice as
many in all, and one of each tenant. Chosen by hand: each holds its chunks in memory."""

VARIANT_LIMIT = 4
"""The number of variants that wait for an idle engine; older ones are dropped. Chosen by hand."""

EARLY_RESTARTS = 1
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


class Scheduler:
    """Owns every request from its arrival to its end, and moves it from state to state.

    **Fetching.** A few requests at a time have their chunks' KV fetched, in the order of
    ``Admission``. From when its fetch begins until it ends, a request holds its chunks in memory.
    While there is no room for those of the next one, it waits, and so do those after it; requests
    of similar turns whose chunks are in memory do not.

    **Running.** Requests get slots in that order, and ``StepComposer`` fills the steps. One chunk
    at a time is computed whatever else waits, more of them only while no answer waits; variants and
    background requests only when there is nothing else at all. A background request keeps its
    slots, paused, while others run, until they need them. When the pool is full, the request
    admitted last is preempted, and starts again later. When one tenant has taken all places, one of
    its requests is preempted for a tenant that has none.

    **Choices.** The answers to one prompt share its slots, or take over the slots of one that has
    ended.

    **The lock.** One lock guards all of this, the queues, the composer and the slots. Public
    methods take it, for a short time; methods whose names begin with an underscore expect that
    their caller has it. While it is held, only the constructor's functions are called, and no
    request ends for its caller. ``closed``, ``preemptions`` and ``piece`` are read without it.
    ``wait`` and the methods below are for the engine's thread only, except ``layers_arrived``.
    """

    def __init__(
        self,
        slots: SequenceSlots,
        fetch: Callable[[Request], object],
        *,
        hold: Callable[[Request], Hold | None],
        is_resident: Callable[[Request], bool],
        admission: Admission,
        composer: StepComposer,
        max_running: int,
    ) -> None:
        """``fetch`` starts fetching a request's KV in another thread, which calls ``loaded`` or
        ``failed`` later; ``hold`` makes room in memory for it before, or returns None if there is
        none now; ``is_resident`` returns whether all of its chunks are in memory. ``max_running``
        is the largest number of requests that hold slots."""
        self._lock = threading.Condition()
        self._admission = admission
        self._composer = composer
        self._slots = slots
        self._fetch = fetch
        self._hold = hold
        self._is_resident = is_resident
        self._max_running = max_running
        self.closed = False
        """True once no more requests are accepted."""

        self.preemptions = 0
        """The number of times that a request has freed its slots for another."""

        self._arrived = 0
        self._by_identity: dict[object, Request] = {}
        self._cancelled: set[Request] = set()

        # LOADING: their KV is to be fetched, by order; is being fetched, also if they have ended
        # meanwhile; or has too few layers, with the number of layers that they wait for
        self._unfetched: list[Request] = []
        self._fetching: set[Request] = set()
        self._late: dict[Request, int] = {}

        # READY or PREEMPTED, by order
        self._waiting: dict[ResultKind, list[Request]] = {kind: [] for kind in ResultKind}

        # RUNNING, by admission; and those of them in the step that is computed
        self._running: list[Request] = []
        self._in_step: frozenset[Request] = frozenset()

    # Arrival and end.

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
                    self._sort(twin.kind)
                return cast(R, twin)
            self._arrived += 1
            request.number = self._arrived
            self._admission.place(request)
            if request.kind is ResultKind.ANSWER:
                share = self._composer.prompt_share
                self._admission.check(request, waiting=self._count_waiting(), prompt_share=share)
            self._admission.lines.add(request)
            self._delay_others(request, request.seconds_left)
            if request.identity is not None:
                self._by_identity[request.identity] = request
            if request.sequence is None:
                _enqueue(self._unfetched, request)
                self._fetch_next()
            else:
                self._move(request, RequestState.READY)
            dropped = self._waiting[ResultKind.VARIANT][VARIANT_LIMIT:]
            for variant in dropped:
                self._move(variant, RequestState.FINISHED)
        for variant in dropped:
            variant.cancel()
        return request

    def loaded(self, request: Request, sequence: TokenSequence) -> bool:
        """Make the request ready, whose KV is there or arriving; return False, and do nothing, if
        it has ended meanwhile."""
        with self._lock:
            self._fetching.discard(request)
            is_wanted = request.state is RequestState.LOADING
            if is_wanted:
                expected, request.sequence = request.pending, sequence
                differs = tuple(request.pending) != tuple(expected)
                if differs and self._admission.predict_again(request):
                    self._sort(request.kind)
                self._move(request, RequestState.READY)
            else:
                self._fetch_next()
            return is_wanted

    def failed(self, request: Request, error: KVLinkerError) -> None:
        """End the request with ``error``, since its KV cannot be had, unless it has ended."""
        with self._lock:
            self._fetching.discard(request)
            ends = request.state is RequestState.LOADING
            if ends:
                self._move(request, RequestState.FINISHED)
            else:
                self._fetch_next()
        if ends:
            request.fail(error)

    def cancel(self, requests: Collection[Request]) -> None:
        """Let the engine's thread end the requests that have not ended, before its next step."""
        with self._lock:
            self._cancelled.update(
                request for request in requests if request.state is not RequestState.FINISHED
            )
            self._lock.notify_all()

    def close(self) -> None:
        """Accept no more requests; the engine's thread ends those that are here. Idempotent."""
        with self._lock:
            self.closed = True
            self._lock.notify_all()

    def wake(self) -> None:
        """Let the engine's thread check again whether there is something to do."""
        with self._lock:
            self._lock.notify_all()

    # What is here.

    def has_unfinished(self, identity: object) -> bool:
        """Return whether a request with that identity is under way."""
        with self._lock:
            return identity in self._by_identity

    def load(self) -> EngineLoad:
        """Return the load at one moment. Requests in the background do not count as running, and
        only requests for answers count as waiting, each once for all of its choices."""
        with self._lock:
            return EngineLoad(
                running=sum(each.kind is not ResultKind.BACKGROUND for each in self._running),
                waiting=self._count_waiting(),
                slots_used=self._slots.used,
                slots_total=self._slots.total,
                slots_kept=self._slots.kept,
            )

    @property
    def loading(self) -> int:
        """The number of requests whose chunks' KV is not there yet."""
        with self._lock:
            return self._count_loading()

    @property
    def idle(self) -> bool:
        """True if there is no request at all."""
        with self._lock:
            return next(self._everything(), None) is None

    def is_alone(self, request: Request) -> bool:
        """Return whether there is nothing to compute, now or later, but this request."""
        with self._lock:
            return set(self._everything()) <= {request}

    @property
    def piece(self) -> LayeredPiece | None:
        """The piece of a prompt of which some layers are computed, while its request runs."""
        return self._composer.pieces.piece

    def find_prefix(
        self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy
    ) -> ReusedPrefix | None:
        """Return the beginning of a prompt that requests have computed; see ``PrefixTree.find``."""
        if not self._slots.keeps_prefixes:
            return None
        with self._lock:
            return self._slots.prefixes.find(tenant, prompt, keys, policy)

    def expect_prefix(
        self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy, seconds: float
    ) -> None:
        """Expect a prompt that begins as this one; see ``PrefixTree.expect``."""
        with self._lock:
            self._slots.prefixes.expect(tenant, prompt, keys, policy, seconds)

    # The engine's thread.

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
        return bool(self.closed or self._cancelled or self._running or any(self._waiting.values()))

    def end_cancelled(self) -> list[Request]:
        """End the requests that were cancelled, and return them, so that their callers can be
        told."""
        with self._lock:
            if not self._cancelled:
                return []
            ended = [request for request in latest_first(self._cancelled) if self._finish(request)]
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
                    logger.exception("A request was not where its state says; it is dropped.")
                    request.state, finished = RequestState.FINISHED, True
                if finished:
                    ended.append(request)
            return ended

    def next_step(self) -> Step | None:
        """Admit requests to slots, and return what to compute next; None where there is nothing."""
        with self._lock:
            self._grow()
            self._admit()
            step = self._composer.compose(self._running)
            if step is None:
                self._in_step = frozenset()
                return None
            for request in step.requests:
                self._admission.note_progress(request)
            self._in_step = frozenset(step.requests)
            return step

    def finish_piece(self, piece: LayeredPiece) -> None:
        """Mark the tokens of a piece of a prompt as done, all of whose layers are computed."""
        with self._lock:
            self._composer.pieces.finish(piece)
            self._admission.note_progress(piece.request)

    def keep(self, request: Request) -> None:
        """Keep what a request has computed so far for those that begin alike, while it goes on."""
        with self._lock:
            self._slots.keep(sequence_of(request))

    def keep_beginning(self, request: Request) -> None:
        """Keep what a request has computed of its prompt, which goes on to be computed, now and
        then; see ``SequenceSlots.keep_beginning``."""
        with self._lock:
            self._slots.keep_beginning(sequence_of(request))

    def leave_prefixes(self, seconds: float) -> None:
        """Leave the KV of prefixes to the next process, once no request is left; see
        ``PrefixTree.leave``."""
        with self._lock:
            self._slots.prefixes.leave(seconds)

    def exclusive_slots(self, request: Request) -> NDArray[np.int64]:
        """Return the slots that only this request holds."""
        with self._lock:
            return self._slots.exclusive_slots(sequence_of(request))

    def fork(self, choice: Request, first: Request) -> None:
        """Add another choice of a running request, whose prompt is computed."""
        with self._lock:
            choice.hold = None if first.hold is None else first.hold.share()
            self._admission.place_choice(choice, first)
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
            sequence.late_count += 1
            layers = max((kv.layer_count for kv in arriving), default=0)
            is_early = sequence.late_count <= EARLY_RESTARTS
            needed = layer + 1 + (layers - layer) // 2 if is_early else layers
            self._late[request] = min(needed, layers)
            self._move(request, RequestState.LOADING)
            self._admission.note_restart(request)
        for kv in arriving:
            kv.subscribe(partial(self.layers_arrived, request))
        self.layers_arrived(request)

    def layers_arrived(self, request: Request) -> None:
        """Make a request that left a step ready, if the layers that it waits for have arrived or
        are lost. The threads that deliver layers call it."""
        with self._lock:
            wanted = self._late.get(request)
            if wanted is None:
                return
            sequence = sequence_of(request)
            if sequence.lost:
                del self._late[request]
                request.lose()
                _enqueue(self._unfetched, request)
                self._fetch_next()
            elif all(kv.delivered >= wanted for kv in sequence.arriving):
                self._move(request, RequestState.READY)

    def wait_in_step(self, arrived: Callable[[], bool]) -> None:
        """Wait in the middle of a step, none of whose requests can go on, until ``arrived`` returns
        true or another request could run. The caller of ``wake`` makes ``arrived`` true; the store
        makes sure that layers arrive, or are lost, in time."""

        def others_could_run() -> bool:
            waiting = self._waiting[ResultKind.ANSWER] or self._waiting[ResultKind.CHUNK]
            running = {each for each in self._running if each.kind is not ResultKind.BACKGROUND}
            return bool(self.closed or self._cancelled or waiting) or not running <= self._in_step

        with self._lock:
            self._lock.wait_for(lambda: arrived() or others_could_run())

    # States.

    def _move(self, request: Request, state: RequestState) -> None:
        """Move the request to another state. Nothing else changes states, or which requests hold
        slots."""
        if state not in NEXT_STATES[request.state]:
            raise RuntimeError(
                f"a request that is {request.state.value} cannot become {state.value}"
            )
        if request.state is RequestState.RUNNING:
            self._stop_running(request, state)
        elif request.state is not RequestState.LOADING:
            self._waiting[request.kind].remove(request)
        elif self._late.pop(request, None) is None and request in self._unfetched:
            self._unfetched.remove(request)  # a fetch that has begun goes on
        request.state = state
        if state is RequestState.RUNNING:
            self._running.append(request)
        elif state in (RequestState.READY, RequestState.PREEMPTED):
            _enqueue(self._waiting[request.kind], request)
        elif state is RequestState.FINISHED:
            self._by_identity.pop(request.identity, None)
            if request.hold is not None:
                request.hold.release()
                request.hold = None
            self._admission.lines.remove(request)
            if not self.closed:  # else no turn is used any more
                self._delay_others(request, -request.seconds_left)
        self._fetch_next()
        self._lock.notify_all()

    def _stop_running(self, request: Request, state: RequestState) -> None:
        """Free the slots of a request that runs no more, or hand them over to another choice."""
        self._composer.pieces.drop(request)
        heir = self._heir(request) if state is RequestState.FINISHED else None
        self._running.remove(request)
        if heir is None:
            self._slots.release(sequence_of(request))
        else:
            self._slots.hand_over(sequence_of(request), sequence_of(heir))
            self._move(heir, RequestState.RUNNING)

    def _heir(self, request: Request) -> Request | None:
        """Return a waiting answer to the same prompt that can take over the slots of a request that
        ends; None if there is none."""
        if self.closed or not sequence_of(request).prompt_in_place:
            return None
        for choice in request.choices:
            waits = choice.state in (RequestState.READY, RequestState.PREEMPTED)
            if waits and choice not in self._cancelled:
                return choice
        return None

    def _finish(self, request: Request) -> bool:
        if request.number is None or request.state is RequestState.FINISHED:
            return False
        self._move(request, RequestState.FINISHED)
        return True

    def _delay_others(self, request: Request, seconds: float) -> None:
        """Delay the turns of those of its tenant that come after the request."""
        if self._admission.lines.delay(request, seconds):
            self._sort(request.kind)

    def _sort(self, kind: ResultKind) -> None:
        """Put waiting requests in order again, after turns of this kind have changed."""
        self._unfetched.sort(key=BY_ORDER)
        self._waiting[kind].sort(key=BY_ORDER)

    def _everything(self) -> Iterator[Request]:
        """Return all requests that are here, and those that have ended while their KV is
        fetched."""
        return chain(
            self._running, self._unfetched, self._fetching, self._late, *self._waiting.values()
        )

    def _count_loading(self) -> int:
        ended = [each for each in self._fetching if each.state is not RequestState.LOADING]
        return len(self._unfetched) + len(self._fetching) + len(self._late) - len(ended)

    def _count_waiting(self) -> int:
        ready = [request for request in self._waiting[ResultKind.ANSWER] if request.choice == 0]
        return self._count_loading() + len(ready)

    # Fetching.

    def _fetch_next(self) -> None:
        """Start fetching for the next requests, while few have KV in memory but no slots, and
        memory has room for their chunks."""
        while self._unfetched and not self.closed:
            request = self._choose_fetch()
            if request is None:
                return
            self._unfetched.remove(request)
            self._fetching.add(request)
            self._fetch(request)

    def _ahead(self) -> list[Request]:
        """Return the requests without slots whose KV is in memory, or on its way there."""
        ready = [request for request in self._waiting[ResultKind.ANSWER] if request.choice == 0]
        return [*self._fetching, *self._late, *ready]

    def _choose_fetch(self) -> Request | None:
        """Return the request to fetch next, which now holds its chunks; None if none may be
        fetched."""
        for request in self._unfetched:
            if request.hold is not None:
                # it lost a chunk, and others may wait for the memory of those that it still holds
                return request
        ahead = self._ahead()
        for request in self._admission.candidates(self._unfetched, ahead, self._is_resident):
            before = [other for other in ahead if other.order <= request.order]
            own = [other for other in ahead if other.tenant == request.tenant]
            if not own or (len(before) < PREFETCH_LIMIT and len(ahead) < 2 * PREFETCH_LIMIT):
                request.hold = self._hold(request)
                if request.hold is not None:
                    return request
        return None

    # Slots.

    def _grow(self) -> None:
        """Assign slots to every running request for the tokens it has; the last admitted ones are
        preempted when there are too few."""
        for request in list(self._running):
            while request.state is RequestState.RUNNING and not self._slots.grow(
                sequence_of(request)
            ):
                self._preempt(next(iter(self._in_background()), self._running[-1]))

    def _in_background(self) -> list[Request]:
        """Return the background request that holds slots, if one does."""
        return [request for request in self._running if request.kind is ResultKind.BACKGROUND]

    def _preempt(self, request: Request) -> None:
        self._move(request, RequestState.PREEMPTED)
        sequence_of(request).restart()
        self._admission.note_restart(request)
        self.preemptions += 1

    def _admit(self) -> None:
        """Assign slots to waiting requests, as far as they go: to the next chunk while none is
        computed, to answers, to more chunks while no answer waits, and to a variant or a background
        request while nothing else is there."""
        answers, chunks = self._waiting[ResultKind.ANSWER], self._waiting[ResultKind.CHUNK]
        before = math.inf
        if chunks and all(
            request.kind in (ResultKind.ANSWER, ResultKind.BACKGROUND) for request in self._running
        ):
            chunk = chunks[0]
            if not self._admit_one(chunk) and chunk.urgent:
                before = chunk.turn  # later answers shall not take the slots that it waits for
        if answers:
            self._admit_answers(before)
        while chunks and not answers and self._admit_one(chunks[0]):
            pass
        for kind in (ResultKind.VARIANT, ResultKind.BACKGROUND):
            if not self._running and self._waiting[kind]:
                self._admit_one(self._waiting[kind][0])

    def _admit_answers(self, before: float) -> None:
        """Admit answers whose turn comes before the time ``before``, in order, until the next one
        does not fit."""
        while self._waiting[ResultKind.ANSWER]:
            # choices whose prompt is being computed can share its KV soon: they are skipped
            soon = {
                choice
                for request in self._running
                if not sequence_of(request).prompt_in_place
                for choice in request.choices
            }
            queue = [
                request
                for request in self._waiting[ResultKind.ANSWER]
                if request.turn < before and request not in soon
            ]
            if not queue or not self._admit_next(queue):
                return

    def _admit_next(self, queue: Sequence[Request]) -> bool:
        """Admit one of the answers; False if none of those that may be next fits."""
        candidates = self._admission.next_answers(queue, self._running)
        admitted = next(filter(self._admit_one, candidates), None)
        if admitted is None:
            admitted = candidates[0]
            if not self._admit_instead(yielding(admitted, self._running), admitted):
                return False
        if self._admission.exchange_turns(admitted, queue):
            self._waiting[ResultKind.ANSWER].sort(key=BY_ORDER)
        return True

    def _admit_one(self, request: Request) -> bool:
        """Assign slots to the request, those of a background request if need be; False if too few
        are free."""
        return self._place(request) or self._admit_instead(self._in_background(), request)

    def _admit_instead(self, others: Sequence[Request], request: Request) -> bool:
        """Preempt ``others``, one after the other, until the request has slots; False, and none is
        preempted, if even theirs are too few."""
        if not others or not self._slots.would_fit(sequence_of(request), map(sequence_of, others)):
            return False
        for other in others:
            other.has_yielded = True
            self._preempt(other)
            if self._admit_one(request):
                return True
        return False

    def _place(self, request: Request) -> bool:
        """Assign free slots to the request; False if they are too few."""
        if len(self._running) >= self._max_running:
            return False
        linked = None
        for choice in request.choices:
            if choice.state is RequestState.RUNNING and sequence_of(choice).prompt_in_place:
                linked = sequence_of(choice)
                break
        if not self._slots.admit(sequence_of(request), linked):
            return False
        self._move(request, RequestState.RUNNING)
        return True

    # Integrity, for tests.

    def check_integrity(self) -> None:
        """Check that every request is where its state says, that exactly the running ones hold
        enough slots, and that none waits for a fetch without a reason. Raises AssertionError
        otherwise."""
        with self._lock:
            self._check_running()
            self._check_waiting()
            here = list(self._everything())
            assert len(set(here)) == len(here)
            unfinished = [each for each in here if each.state is not RequestState.FINISHED]
            self._admission.lines.check_integrity(unfinished)
            assert all(
                request.state is not RequestState.FINISHED for request in self._by_identity.values()
            )
            self._check_loading(is_held=any(request.hold is not None for request in here))

    def _check_running(self) -> None:
        self._slots.check_integrity([sequence_of(request) for request in self._running])
        assert len(self._running) <= self._max_running
        assert all(request.state is RequestState.RUNNING for request in self._running)

    def _check_waiting(self) -> None:
        for kind, waiting in self._waiting.items():
            assert all(request.kind is kind for request in waiting)
            assert all(
                request.state in (RequestState.READY, RequestState.PREEMPTED)
                and sequence_of(request).spans is None
                for request in waiting
            )
            assert _is_sorted(waiting)

    def _check_loading(self, *, is_held: bool) -> None:
        """Check the requests that are LOADING; ``is_held`` is true if any request holds chunks."""
        assert _is_sorted(self._unfetched)
        assert all(
            request.state is RequestState.LOADING for request in (*self._unfetched, *self._late)
        )
        assert all(
            request.hold is not None
            for request in (*self._fetching, *self._late)
            if request.state is RequestState.LOADING
        )
        waits_for_memory = is_held or len(self._ahead()) >= PREFETCH_LIMIT
        assert not self._unfetched or waits_for_memory or self.closed


def _enqueue(queue: list[Request], request: Request) -> None:
    """Insert the request in its order."""
    insort(queue, request, key=BY_ORDER)


def _is_sorted(queue: Iterable[Request]) -> bool:
    queue = list(queue)
    return queue == sorted(queue, key=BY_ORDER)
