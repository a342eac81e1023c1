"""Decides which waiting request is next: the order, its fairness between tenants, and refusals."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from kvlinker.engines.contract.limits import check_room, check_wait
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.engines.embedded.scheduling.lines import Lines
from kvlinker.linking.plan import Range

SIMILAR_SECONDS = 0.5
"""The most by which two requests' turns may differ if the one whose chunks are in memory is to come
first."""

MOST_AHEAD = 30.0
"""The most seconds by which a workflow's request may come before others of its tenant that arrived
earlier; a workflow that has asked for nothing for so long begins anew."""

MOST_WORKFLOWS = 1024
"""The most workflows whose beginnings are remembered."""

MOST_COMPARED = 16
"""The most waiting requests that are compared by their chunks."""

Predict = Callable[[Sequence[Range]], float | None]
"""Predicts the seconds of computing these positions of a prompt; None if nothing was measured."""


class Admission:
    """Orders requests by their *turn*: time of arrival, plus the predicted seconds of the prompt,
    plus the predicted seconds of those prompts of the same tenant that come before it by the first
    two.

    So a short prompt overtakes a long one that has waited for less time than it takes to compute
    itself, and none starves: a request that arrives after another's turn comes after it. A tenant's
    hundred requests wait for each other, but another tenant's one does not wait for them. Before
    steps were measured, turns are arrivals.

    Where a tenant's request has its turn, the one of its workflow that began first goes, so that
    workflows come one after the other rather than all at once; the two exchange their turns.

    A tenant of whom nothing is computed comes before tenants of whom something is, and is never
    refused for the length of a queue in which it has nothing.

    The scheduler calls all methods under its lock.
    """

    def __init__(
        self,
        predict: Predict,
        *,
        max_waiting: int,
        slo_ttft: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_waiting`` is the most requests for answers that wait, ``slo_ttft`` the most seconds
        to the first token that one may be predicted to need together with others; None for no such
        limit."""
        self._predict = predict
        self._max_waiting = max_waiting
        self._slo_ttft = slo_ttft
        self._clock = clock
        self.lines = Lines()
        """All requests that are here; those that have their turn are added by the scheduler."""

        self._workflows: OrderedDict[tuple[str, str], tuple[float, float]] = (
            OrderedDict()
        )  # when each began and asked last

    def place(self, request: Request) -> None:
        """Give the request, which arrives now, its turn among those that are here."""
        request.arrived = self._clock()
        request.began = self._began(request)
        request.prompt_seconds = request.seconds_left = self._predict_left(request)
        request.backlog = self.lines.seconds_before(request)

    def _began(self, request: Request) -> float:
        """Return when the request's workflow began, but at most ``MOST_AHEAD`` before now."""
        now = request.arrived
        if request.workflow is None:
            return now
        name = request.tenant, request.workflow
        began, last = self._workflows.get(name, (now, now))
        if last < now - MOST_AHEAD:
            began = now
        self._workflows[name] = began, now
        self._workflows.move_to_end(name)
        if len(self._workflows) > MOST_WORKFLOWS:
            self._workflows.popitem(last=False)
        return max(began, now - MOST_AHEAD)

    def push_back(self, request: Request, seconds: float) -> bool:
        """Give those of its tenant that come after the request turns that are later by so many
        ``seconds``; return whether there are any."""
        return bool(seconds) and self.lines.push_back(request, seconds)

    def hurry(self, request: Request) -> None:
        """Make the request urgent, and change the turns of its tenant accordingly."""
        self.lines.remove(request)
        self.push_back(request, -request.seconds_left)
        request.urgent = True
        request.backlog = self.lines.seconds_before(request)
        self.lines.add(request)
        self.push_back(request, request.seconds_left)

    def predict_anew(self, request: Request) -> bool:
        """Predict the seconds of the request's prompt again, now that more is known of it, and
        change the turns of its tenant accordingly; return whether others' have changed. Work that
        was done before its turn still counts."""
        self.lines.remove(request)
        left = self.push_back(request, -request.seconds_left)
        before = self.lines.seconds_before(request)
        request.prompt_seconds = request.seconds_left = self._predict_left(request)
        after = self.lines.seconds_before(request)
        request.backlog = max(0.0, request.backlog + after - before)
        self.lines.add(request)
        return self.push_back(request, request.seconds_left) or left

    def _predict_left(self, request: Request) -> float:
        """Predict the seconds of computing the rest of the request's prompt; 0 if nothing was
        measured."""
        left = request.pending
        return (self._predict(left) or 0.0) if left else 0.0

    def note_progress(self, request: Request) -> None:
        """Predict what is left of a request that is here, some of which will now be computed."""
        self.lines.note_left(request, self._predict_left(request))

    def note_restart(self, request: Request) -> None:
        """Note that all of the prompt of a request that is here has to be computed again."""
        self.lines.note_left(request, request.prompt_seconds)

    def check(self, request: Request, *, waiting: int, prompt_share: float) -> None:
        """Check that a request for an answer, which has its turn, may wait together with those that
        are here.

        ``waiting`` of them count against ``max_waiting``; ``prompt_share`` of the time goes to
        prompts. Raises OverloadedError.
        """
        if any(other.waits for other in self.lines.answers_of(request.tenant)):
            check_room(waiting, 1, most=self._max_waiting)
        if self._slo_ttft is not None:
            before = self.lines.seconds_until(request.turn)
            check_wait(
                before / prompt_share, request.prompt_seconds / prompt_share, most=self._slo_ttft
            )

    def candidates(
        self,
        queue: Sequence[Request],
        beside: Iterable[Request],
        prefers: Callable[[Request], bool],
    ) -> list[Request]:
        """Return who may come next of a ``queue`` in order of turns, best first: the first whose
        tenant has none of the requests ``beside``, while others have some; else the first of
        similar turn that ``prefers`` is true of, if there is one, and the first of all."""
        tenants = {request.tenant for request in beside}
        left_out = (
            next((request for request in queue if request.tenant not in tenants), None)
            if tenants
            else None
        )
        if left_out is not None:
            return [_first_of_workflow(left_out, queue)]
        similar = [
            request
            for request in queue[:MOST_COMPARED]
            if request.turn <= queue[0].turn + SIMILAR_SECONDS
        ]
        preferred = next((request for request in similar if prefers(request)), queue[0])
        found = (_first_of_workflow(request, queue) for request in (preferred, queue[0]))
        return list(dict.fromkeys(found))

    def pass_on(self, admitted: Request, queue: Sequence[Request]) -> bool:
        """Where the request went in the place of one of its tenant that is before it in the
        ``queue``, give that one its place, so that the tenant is ahead of no other; return whether
        that was so."""
        own = (other for other in queue if other.tenant == admitted.tenant)
        passed = next(own, admitted)
        ahead = admitted.turn - passed.turn
        if admitted.workflow is None or admitted.began >= passed.began or ahead <= 0:
            return False
        passed.backlog += ahead
        return True

    def next_answers(self, queue: Sequence[Request], running: Sequence[Request]) -> list[Request]:
        """Return the answers of a ``queue`` that may get slots next, best first, in addition to the
        ``running`` requests; preferred are those that share chunks with these."""
        answers = [request for request in running if request.kind is ResultKind.ANSWER]
        holds = [request.hold for request in running if request.hold is not None]
        in_use = frozenset(chain.from_iterable(hold.keys for hold in holds))
        return self.candidates(
            queue, answers, lambda request: not in_use.isdisjoint(request.chunk_bytes)
        )


def giving_way(request: Request, running: Sequence[Request]) -> list[Request]:
    """Return the ``running`` requests, in order of admission, that may give their slots up to a
    request whose tenant has nothing running, the best choice first.

    They belong to the tenant that has the most, which keeps one. Each gives way once in its life;
    those that have not given a token yet go first, since their pause is not seen, and then those
    that were admitted last.
    """
    answers = [other for other in running if other.kind is ResultKind.ANSWER]
    places = Counter(other.tenant for other in answers)
    if request.kind is not ResultKind.ANSWER or not places or places[request.tenant]:
        return []
    tenant, _ = places.most_common(1)[0]
    own = [other for other in answers if other.tenant == tenant]
    found = [other for other in reversed(own[1:]) if not other.gave_way]
    return sorted(
        found, key=lambda other: other.sequence is not None and other.sequence.prompt_in_place
    )


def _first_of_workflow(request: Request, queue: Sequence[Request]) -> Request:
    """Return which of its tenant's requests goes in its place: itself, or one of a workflow that
    began before."""
    own = (
        other
        for other in queue[:MOST_COMPARED]
        if other.tenant == request.tenant and other.workflow is not None
    )
    return min((request, *own), key=lambda other: other.began)
