"""Holds the requests that run: gives them slots in the order of admission, and takes slots back for
others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kvlinker.engines.embedded.requests.request import Request, RequestState, ResultKind
from kvlinker.engines.embedded.scheduling.admission import Admission, giving_way
from kvlinker.engines.embedded.scheduling.composition import sequence_of
from kvlinker.engines.embedded.scheduling.slots import SequenceSlots
from kvlinker.engines.embedded.scheduling.turn_queue import TurnQueue


class RunningRequests:
    """Holds the running requests, by admission, and their slots.

    One chunk at a time is computed whatever else waits, more of them only while nobody waits for an
    answer; variants and background requests only when there is nothing else at all. A background
    request keeps its slots, paused, while others run, until they need them. When the pool is full,
    the request admitted last gives its slots up and starts again later; when one tenant has taken
    all places, it gives one up to a tenant that has none.

    The scheduler calls all methods under its lock.
    """

    def __init__(
        self,
        slots: SequenceSlots,
        admission: Admission,
        waiting: Mapping[ResultKind, TurnQueue],
        move: Callable[[Request, RequestState], None],
        *,
        max_running: int,
    ) -> None:
        """``waiting`` has the requests that want slots, by kind and in order; ``move`` changes a
        request's state, and adds it to ``requests`` or calls ``remove``. ``max_running`` is the
        most requests that hold slots."""
        self.slots = slots
        self.requests: list[Request] = []
        self.preemptions = 0
        self._admission = admission
        self._waiting = waiting
        self._move = move
        self._max_running = max_running

    def remove(self, request: Request, heir: Request | None) -> None:
        """Take back the slots of a request that runs no more; give them to the ``heir`` where there
        is one."""
        self.requests.remove(request)
        if heir is None:
            self.slots.release(sequence_of(request))
        else:
            self.slots.hand_over(sequence_of(request), sequence_of(heir))

    def check_integrity(self) -> None:
        """Check that exactly the running requests hold enough slots. Raises AssertionError
        otherwise."""
        self.slots.check_integrity([sequence_of(request) for request in self.requests])
        assert len(self.requests) <= self._max_running
        assert all(request.state is RequestState.RUNNING for request in self.requests)

    def grow(self) -> None:
        """Give every running request slots for the tokens it has; the last admitted ones are
        preempted when there are too few."""
        for request in list(self.requests):
            while request.state is RequestState.RUNNING and not self.slots.grow(
                sequence_of(request)
            ):
                self._preempt(next(iter(self._in_background), self.requests[-1]))

    @property
    def _in_background(self) -> list[Request]:
        """The background request that holds slots, if one does."""
        return [request for request in self.requests if request.kind is ResultKind.BACKGROUND]

    def _preempt(self, request: Request) -> None:
        self._move(request, RequestState.PREEMPTED)
        sequence_of(request).restart()
        self._admission.note_restart(request)
        self.preemptions += 1

    def admit(self) -> None:
        """Give slots to waiting requests, as far as they go: to the next chunk while none is
        computed, to answers, to more chunks while no answer waits, and to a variant or a background
        request while nothing else is there."""
        chunk = next(iter(self._waiting[ResultKind.CHUNK]), None)
        its_turn = chunk is not None and all(
            request.kind in (ResultKind.ANSWER, ResultKind.BACKGROUND) for request in self.requests
        )
        if chunk is not None and its_turn and not self._admit_one(chunk) and chunk.urgent:
            self._admit_answers(
                before=chunk.turn
            )  # later ones shall not take the slots it waits for
        else:
            self._admit_answers()
        if not self._waiting[ResultKind.ANSWER]:
            while self._waiting[ResultKind.CHUNK] and self._admit_one(
                self._waiting[ResultKind.CHUNK][0]
            ):
                pass
        for kind in (ResultKind.VARIANT, ResultKind.BACKGROUND):
            if not self.requests and self._waiting[kind]:
                self._admit_one(self._waiting[kind][0])

    def _admit_answers(self, before: float = math.inf) -> None:
        """Admit answers whose turn comes ``before`` then, in order, until the next one does not
        fit."""
        while self._waiting[ResultKind.ANSWER]:
            # what is left out can share a prompt's KV soon, which is being computed
            soon = {
                choice
                for request in self.requests
                if not _prompt_in_place(request)
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
        candidates = self._admission.next_answers(queue, self.requests)
        admitted = next(filter(self._admit_one, candidates), None)
        if admitted is None:
            admitted = candidates[0]
            if not self._admit_without(giving_way(admitted, self.requests), admitted):
                return False
        if self._admission.pass_on(admitted, queue):
            self._waiting[ResultKind.ANSWER].disorder()
        return True

    def _admit_one(self, request: Request) -> bool:
        """Give the request slots, those of a background request if need be; False if too few are
        free."""
        return self._place(request) or self._admit_without(self._in_background, request)

    def _admit_without(self, others: Sequence[Request], request: Request) -> bool:
        """Give the request slots that ``others`` give up for it, one after the other; False, and
        none does, if even those are too few."""
        if not others or not self.slots.would_fit(sequence_of(request), map(sequence_of, others)):
            return False
        for other in others:
            other.gave_way = True
            self._preempt(other)
            if self._admit_one(request):
                return True
        return False

    def _place(self, request: Request) -> bool:
        """Give the request slots that are free; False if they are too few."""
        if len(self.requests) >= self._max_running:
            return False
        running = [each for each in request.choices if each.state is RequestState.RUNNING]
        linked = next((sequence_of(each) for each in running if _prompt_in_place(each)), None)
        if not self.slots.admit(sequence_of(request), linked):
            return False
        self._move(request, RequestState.RUNNING)
        return True


def _prompt_in_place(request: Request) -> bool:
    return sequence_of(request).prompt_in_place
