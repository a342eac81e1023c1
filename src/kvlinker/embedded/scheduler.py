"""Continuous batching: the state machine of all requests, and the choice of the runs that the next step computes."""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar, cast

from kvlinker.embedded.batch import Batch, Run, Sight
from kvlinker.embedded.requests import Kind, Request, State
from kvlinker.embedded.sequence import TokenSequence
from kvlinker.embedded.slots import SequenceSlots
from kvlinker.engine.limits import check_room, engine_closed
from kvlinker.errors import KVLinkerError
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt, ReusedPrefix
from kvlinker.store.holds import Hold

PREFETCHED = 8
"""The number of waiting requests whose chunks' KV is fetched ahead; those behind them fetch it later."""

MOST_VARIANTS = 4
"""The most variants that wait for an idle engine; older ones are dropped."""

MOST_RESTARTS = 1
"""The number of times that a request that left a step may begin again before all layers of its chunks have arrived."""

NEXT_STATES = {
    State.LOADING: {State.READY, State.FINISHED},
    State.READY: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PREEMPTED, State.LOADING, State.FINISHED},
    State.PREEMPTED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set[State](),
}

R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: runs to compute for ``requests``."""

    batch: Batch
    requests: tuple[Request, ...]


class Scheduler:
    """Owns every request from its arrival to its end, and moves it from state to state.

    **Loading.** A few requests at a time have their chunks' KV fetched, in order of arrival: so many that the queue for
    slots is never empty, and so few that what is fetched ahead stays bounded. From then until its end, a request holds
    its chunks in memory; the next one waits while there is no room for its own.

    **Running.** First come, first served, under a token budget per step. Decoding comes first in every step; what is
    left of the budget goes to prompts in order of admission, cut where it ends, and then to chunks. One chunk at a time
    is computed whatever else waits, more of them only while nobody waits for an answer; variants only when there is
    nothing else at all. When the pool is full, the request admitted last gives its slots up and starts again later.

    **Choices.** The answers to one prompt share its slots, or take over the slots of one that has ended.

    All methods hold one lock, for a short time, and call no code from outside under it but ``load`` and ``hold``. The
    methods below
    ``check_integrity`` are for the engine's thread only.
    """

    def __init__(
        self,
        slots: SequenceSlots,
        load: Callable[[Request], object],
        *,
        hold: Callable[[Request], Hold | None],
        max_step_tokens: int,
        max_running: int,
        max_waiting: int,
    ) -> None:
        """``load`` starts fetching a request's KV in another thread, which calls ``loaded`` or ``failed`` later;
        ``hold`` makes room in memory for it before, or returns None if there is none now.
        ``max_step_tokens`` is the token budget of a step, ``max_running`` the most requests that hold slots,
        ``max_waiting`` the most requests for answers that wait."""
        self._slots = slots
        self._load = load
        self._hold = hold
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._changed = threading.Condition()  # everything below is guarded by it
        self._closed = False
        self._arrived = 0
        self._unfetched: list[Request] = []  # LOADING, by order
        self._fetching: set[Request] = set()  # until their loads report, even if they have ended meanwhile
        self._late: dict[Request, int] = {}  # LOADING, with the number of layers that they wait for
        self._waiting: dict[Kind, list[Request]] = {kind: [] for kind in Kind}  # READY or PREEMPTED, by order
        self._running: list[Request] = []  # by admission
        self._in_step: frozenset[Request] = frozenset()
        self._cancelled: set[Request] = set()
        self._by_identity: dict[object, Request] = {}
        self.preemptions = 0

    @property
    def closed(self) -> bool:
        """True once no more requests are accepted."""
        return self._closed

    @property
    def running(self) -> int:
        """The number of requests, for answers or chunks, that hold slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of requests for answers that hold no slots. Choices that wait for their turn do not count, nor do
        chunks."""
        with self._changed:
            return self._count_waiting()

    @property
    def slots_used(self) -> int:
        """The number of slots that requests hold."""
        with self._changed:
            return self._slots.used

    @property
    def slots_kept(self) -> int:
        """The number of slots that hold nothing but what later requests may reuse."""
        with self._changed:
            return self._slots.kept

    @property
    def idle(self) -> bool:
        """True if there is no request at all."""
        with self._changed:
            return not (self._running or self._unfetched or self._fetching or self._late) and not any(
                self._waiting.values()
            )

    def enter(self, request: R) -> R:
        """Accept the request, or return the unfinished one with the same identity.

        Raises OverloadedError for an answer when too many wait, and EngineClosedError.
        """
        with self._changed:
            if self._closed:
                raise engine_closed()
            twin = self._by_identity.get(request.identity)
            if twin is not None:
                self._hurry(twin, request)
                return cast(R, twin)
            if request.kind is Kind.ANSWER:
                check_room(self._count_waiting(), 1, most=self._max_waiting)
            self._arrived += 1
            request.number = self._arrived
            if request.identity is not None:
                self._by_identity[request.identity] = request
            if request.sequence is None:
                self._queue_to_fetch(request)
            else:
                self._move(request, State.READY)
            forgotten = self._waiting[Kind.VARIANT][MOST_VARIANTS:]
            for variant in forgotten:
                self._move(variant, State.FINISHED)
        for variant in forgotten:
            variant.cancel()
        return request

    def loaded(self, request: Request, sequence: TokenSequence) -> None:
        """Have the request, whose KV is there or arriving, wait for slots; do nothing if it has ended meanwhile."""
        with self._changed:
            self._fetching.discard(request)
            if request.state is State.LOADING:
                request.sequence = sequence
                self._move(request, State.READY)
            self._fetch_next()

    def failed(self, request: Request, error: KVLinkerError) -> None:
        """End the request with ``error``, since its KV cannot be had, unless it has ended."""
        with self._changed:
            self._fetching.discard(request)
            ends = request.state is State.LOADING
            if ends:
                self._move(request, State.FINISHED)
            self._fetch_next()
        if ends:
            request.fail(error)

    def cancel(self, requests: Collection[Request]) -> None:
        """Have the engine's thread end those that have not ended, before its next step."""
        with self._changed:
            self._cancelled.update(request for request in requests if request.state is not State.FINISHED)
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more requests; the engine's thread ends those that are here. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Have the engine's thread check again whether there is something to do."""
        with self._changed:
            self._changed.notify_all()

    def is_alone(self, request: Request) -> bool:
        """Return whether there is nothing to compute, now or later, but this request."""
        with self._changed:
            others = (*self._running, *self._unfetched, *self._fetching, *self._late, *chain(*self._waiting.values()))
            return all(other is request for other in others)

    def check_integrity(self) -> None:
        """Check that every request is where its state says, and that exactly the running ones hold enough slots. Raises
        AssertionError otherwise."""
        with self._changed:
            self._slots.check_integrity([_sequence(request) for request in self._running])
            assert len(self._running) <= self._max_running
            assert all(request.state is State.RUNNING for request in self._running)
            for kind, waiting in self._waiting.items():
                assert all(request.kind is kind for request in waiting)
                assert all(request.state in (State.READY, State.PREEMPTED) for request in waiting)
                assert all(request.sequence is not None and request.sequence.spans is None for request in waiting)
                assert waiting == sorted(waiting, key=_order_of)
            assert all(request.state is State.LOADING for request in (*self._unfetched, *self._late))
            assert not self._fetching.intersection(self._unfetched, self._late)
            everywhere = [*self._running, *self._unfetched, *self._late, *chain(*self._waiting.values())]
            assert len(set(everywhere)) == len(everywhere)
            assert all(request.state is not State.FINISHED for request in self._by_identity.values())
            assert self._closed or not self._unfetched or self._ahead() >= PREFETCHED or self._holding()
            loading = (request for request in (*self._fetching, *self._late) if request.state is State.LOADING)
            assert all(request.hold is not None for request in loading)

    def wait(self) -> bool:
        """Wait until there is something to compute or to cancel; False once the scheduler is closed."""
        with self._changed:
            self._in_step = frozenset()
            self._changed.wait_for(
                lambda: self._closed or self._cancelled or self._running or any(self._waiting.values())
            )
            return not self._closed

    def take_cancelled(self) -> list[Request]:
        """End the requests that were cancelled, and return them, so that their callers can be told."""
        with self._changed:
            ended = [request for request in self._cancelled if self._finish(request)]
            self._cancelled.clear()
            return ended

    def finish_all(self) -> list[Request]:
        """End all requests, and return them, so that their callers can be told."""
        with self._changed:
            self._closed = True
            requests = {*self._unfetched, *self._fetching, *self._late, *self._running, *chain(*self._waiting.values())}
            return [request for request in requests if self._finish(request)]

    def next_step(self) -> Step | None:
        """Admit requests to slots, and return what to compute next; None where there is nothing."""
        with self._changed:
            self._grow_running()
            self._admit()
            budget = self._max_step_tokens
            runs: list[Run] = []
            sights: dict[object, Sight] = {}
            requests: list[Request] = []
            for request in sorted(self._running, key=_rank):
                if budget <= 0:
                    break
                sequence = _sequence(request)
                taken, sight = sequence.take(budget)
                if taken:
                    budget -= sum(len(run.tokens) for run in taken)
                    runs += taken
                    sights[sequence] = sight
                    requests.append(request)
            self._in_step = frozenset(requests)
            if not runs:
                return None
            return Step(Batch(tuple(runs), sights), tuple(requests))

    def find_prefix(self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy) -> ReusedPrefix | None:
        """Return the beginning of a prompt that requests have computed; see ``PrefixTree.find``."""
        with self._changed:
            return self._slots.find_prefix(tenant, prompt, keys, policy)

    def keep(self, request: Request) -> None:
        """Keep what a request has computed so far for those that begin alike, while it goes on."""
        with self._changed:
            self._slots.keep(_sequence(request))

    def fork(self, choice: Request, first: Request) -> None:
        """Add another choice of a running request, whose prompt is computed."""
        with self._changed:
            choice.number = first.number
            choice.hold = None if first.hold is None else first.hold.share()
            self._move(choice, State.READY)

    def finish(self, request: Request) -> bool:
        """End the request, and free its slots; False if it has ended before."""
        with self._changed:
            return self._finish(request)

    def leave(self, request: Request, layer: int) -> None:
        """Take a request out of a step that lacked a chunk's ``layer``. It begins again once that layer and half of
        those behind it have arrived, at the second time once all have; if the layer is lost, the request is loaded
        again."""
        sequence = _sequence(request)
        arriving = sequence.arriving
        with self._changed:
            sequence.restart()
            sequence.times_left += 1
            layers = max((kv.layer_count for kv in arriving), default=0)
            needed = layers if sequence.times_left > MOST_RESTARTS else layer + 1 + (layers - layer) // 2
            self._late[request] = min(needed, layers)
            self._move(request, State.LOADING)
        for kv in arriving:
            kv.subscribe(partial(self._layers_came, request))
        self._layers_came(request)

    def wait_in_step(self, came: Callable[[], bool]) -> None:
        """Wait in the middle of a step, none of whose requests can go on, until ``came`` returns true or another
        request could run. Whatever makes ``came`` true has to call ``wake``; the store makes sure that layers arrive,
        or are lost, in time."""

        def others_could_run() -> bool:
            waiting = self._waiting[Kind.ANSWER] or self._waiting[Kind.CHUNK]
            return bool(self._closed or self._cancelled or waiting) or not self._in_step.issuperset(self._running)

        with self._changed:
            self._changed.wait_for(lambda: came() or others_could_run())

    def _move(self, request: Request, state: State) -> None:
        """Move the request to another state. Nothing else changes states, or which requests hold slots."""
        if state not in NEXT_STATES[request.state]:
            raise RuntimeError(f"a request that is {request.state.value} cannot become {state.value}")
        if request.state is State.RUNNING:
            self._running.remove(request)
            heir = self._heir(request) if state is State.FINISHED else None
            if heir is None:
                self._slots.release(_sequence(request))
            else:
                self._slots.hand_over(_sequence(request), _sequence(heir))
                self._move(heir, State.RUNNING)
        elif request.state is not State.LOADING:
            self._waiting[request.kind].remove(request)
        elif request in self._late:
            del self._late[request]
        elif request in self._unfetched:
            self._unfetched.remove(request)
        request.state = state
        if state is State.RUNNING:
            self._running.append(request)
        elif state in (State.READY, State.PREEMPTED):
            insort(self._waiting[request.kind], request, key=_order_of)
        elif state is State.FINISHED:
            self._by_identity.pop(request.identity, None)
            if request.hold is not None:
                request.hold.release()
                request.hold = None
        self._fetch_next()
        self._changed.notify_all()

    def _finish(self, request: Request) -> bool:
        if request.number is None or request.state is State.FINISHED:
            return False
        self._move(request, State.FINISHED)
        return True

    def _count_waiting(self) -> int:
        loading = sum(request.state is State.LOADING for request in self._fetching)
        first = sum(request.choice == 0 for request in self._waiting[Kind.ANSWER])
        return len(self._unfetched) + loading + len(self._late) + first

    def _ahead(self) -> int:
        """Count the requests without slots that have KV in memory, or on its way there."""
        return len(self._fetching) + len(self._late) + sum(r.choice == 0 for r in self._waiting[Kind.ANSWER])

    def _holding(self) -> bool:
        """Return whether a request holds chunks in memory, for which others may have to wait."""
        everywhere = (*self._running, *self._fetching, *self._late, *chain(*self._waiting.values()))
        return any(request.hold is not None for request in everywhere)

    def _queue_to_fetch(self, request: Request) -> None:
        insort(self._unfetched, request, key=_order_of)
        self._fetch_next()

    def _fetch_next(self) -> None:
        """Start fetching KV for the next requests, up to the limit of prefetched ones, while memory has room for it."""
        while self._unfetched and not self._closed and self._ahead() < PREFETCHED:
            request = self._unfetched[0]
            request.hold = request.hold or self._hold(request)
            if request.hold is None:
                return
            del self._unfetched[0]
            self._fetching.add(request)
            self._load(request)

    def _hurry(self, twin: Request, request: Request) -> None:
        """Move ``twin`` to the front of its queue if an answer waits for ``request``, which has the same identity."""
        if request.urgent and not twin.urgent:
            queue = self._waiting[twin.kind]
            waits = twin in queue
            if waits:
                queue.remove(twin)
            twin.urgent = True
            if waits:
                insort(queue, twin, key=_order_of)

    def _layers_came(self, request: Request) -> None:
        """Make a request that left a step ready, if the layers that it waits for have arrived or are lost."""
        with self._changed:
            if request not in self._late:
                return
            sequence = _sequence(request)
            if sequence.lost:
                del self._late[request]
                request.lose()
                self._queue_to_fetch(request)
            elif all(kv.delivered >= self._late[request] for kv in sequence.arriving):
                self._move(request, State.READY)

    def _grow_running(self) -> None:
        """Give every running request slots for the tokens it has; the last admitted ones are preempted when there are
        too few."""
        for request in list(self._running):
            while request.state is State.RUNNING and not self._slots.grow(_sequence(request)):
                last = self._running[-1]
                self._move(last, State.PREEMPTED)
                _sequence(last).restart()
                self.preemptions += 1

    def _admit(self) -> None:
        chunk = next(iter(self._waiting[Kind.CHUNK]), None)
        its_turn = chunk is not None and all(request.kind is Kind.ANSWER for request in self._running)
        if chunk is not None and its_turn and not self._admit_one(chunk) and chunk.urgent:
            self._admit_from(Kind.ANSWER, before=_number(chunk))  # later ones shall not take the slots it waits for
        else:
            self._admit_from(Kind.ANSWER)
        if not self._waiting[Kind.ANSWER]:
            self._admit_from(Kind.CHUNK)
        if not self._running and self._waiting[Kind.VARIANT]:
            self._admit_one(self._waiting[Kind.VARIANT][0])

    def _admit_from(self, kind: Kind, before: float = math.inf) -> None:
        """Admit requests of this kind that arrived before number ``before``, in order, until the next one does not
        fit."""
        queue = self._waiting[kind]
        passed_over = 0
        while passed_over < len(queue) and _number(queue[passed_over]) < before:
            request = queue[passed_over]
            running = [choice for choice in request.choices if choice.state is State.RUNNING]
            if not all(_sequence(choice).prompt_in_place for choice in running):
                passed_over += 1  # the prompt is being computed: its KV can be shared soon
            elif not self._admit_one(request):
                return

    def _admit_one(self, request: Request) -> bool:
        """Give the request slots; False if too few are free."""
        if len(self._running) >= self._max_running:
            return False
        siblings = [choice for choice in request.choices if choice.state is State.RUNNING]
        linked = next((_sequence(choice) for choice in siblings if _sequence(choice).prompt_in_place), None)
        if not self._slots.admit(_sequence(request), linked):
            return False
        self._move(request, State.RUNNING)
        return True

    def _heir(self, request: Request) -> Request | None:
        """Return a waiting answer to the same prompt that can take over the slots of a request that ends; None if there
        is none."""
        if self._closed or not _sequence(request).prompt_in_place:
            return None
        waiting = (choice for choice in request.choices if choice.state in (State.READY, State.PREEMPTED))
        return next((choice for choice in waiting if choice not in self._cancelled), None)


def _order_of(request: Request) -> tuple[int, ...]:
    return request.order


def _sequence(request: Request) -> TokenSequence:
    assert request.sequence is not None
    return request.sequence


def _number(request: Request) -> int:
    assert request.number is not None
    return request.number


def _rank(request: Request) -> int:
    """Rank decoding before prompts, and these before chunks."""
    if request.kind is not Kind.ANSWER:
        return 2
    return 0 if _sequence(request).decoding else 1
