"""Orders waiting requests by their turns, fairly between tenants, and refuses those that would wait
too long."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from kvlinker.engines.contract.contract import check_room, check_wait
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.prompting.segments import Range

CHUNK_DELAY = 10.0
"""The seconds that chunks for which no answer waits give to answers that arrive later; chosen by
hand."""

SIMILAR_SECONDS = 0.5
"""The largest difference, in seconds, between the turns of two requests of which the one whose
chunks are in memory goes first; chosen by hand."""

WORKFLOW_LEAD_SECONDS = 30.0
"""The largest number of seconds by which a workflow's request goes before others of its tenant that
arrived earlier. A workflow that has asked for nothing for so long begins anew. Chosen by hand."""

WORKFLOW_LIMIT = 1024
"""The number of workflows whose beginnings are remembered: some tens of bytes each."""

COMPARED_REQUESTS = 16
"""The number of waiting requests, from the first on, that are compared by their chunks: it bounds
the time under the scheduler's lock."""

BY_ORDER = attrgetter("order")
"""The key by which queues are sorted."""

BY_DUE = attrgetter("due", "number")
"""The key by which lines are sorted."""

Predict = Callable[[Sequence[Range]], float | None]
"""Predicts the seconds of computing these positions of a prompt; None if nothing was measured."""

LineName = tuple[str, ResultKind, bool]
"""The tenant, kind and urgency that the requests of one line have in common."""


def set_turn(request: Request) -> None:
    """Compute the request's turn, and its place in queues, from its arrival and predictions. Call
    it after one of these, or its urgency, has changed."""
    if request.kind in (ResultKind.VARIANT, ResultKind.BACKGROUND):
        request.deferral = math.inf
    else:
        waits_for_answers = request.kind is ResultKind.CHUNK and not request.urgent
        request.deferral = CHUNK_DELAY if waits_for_answers else 0.0
    request.due = request.arrived + request.deferral + request.prompt_seconds
    request.turn = request.due + request.backlog
    assert request.number is not None
    if request.kind is ResultKind.VARIANT:
        request.order = (-request.number,)  # the last ones are the likeliest to be requested again
    else:
        request.order = (not request.urgent, request.turn, request.number, request.choice)


class Lines:
    """Holds the requests that have not ended, each in the line of its tenant, kind and urgency, by
    when it is due, and sums up the predicted seconds that are left of them.

    A request that comes last in its line, as most do, is entered and counted in a time that grows
    with the logarithm of the line's length. One that comes earlier moves those behind it.
    """

    def __init__(self) -> None:
        self._lines: dict[LineName, list[Request]] = {}
        self._seconds: dict[LineName, float] = {}  # left of all in a line together

    def add(self, request: Request) -> None:
        """Put the request into its line. ``due`` and ``urgent`` must not change until it is taken
        out."""
        name = request.tenant, request.kind, request.urgent
        insort(self._lines.setdefault(name, []), request, key=BY_DUE)
        self._seconds[name] = self._seconds.get(name, 0.0) + request.seconds_left

    def remove(self, request: Request) -> None:
        """Take the request out of its line. Raises KeyError or ValueError where it is in none."""
        name = request.tenant, request.kind, request.urgent
        line = self._lines[name]
        del line[line.index(request, bisect_left(line, BY_DUE(request), key=BY_DUE))]
        self._seconds[name] -= request.seconds_left
        if not line:
            del self._lines[name], self._seconds[name]

    def note_left(self, request: Request, seconds: float) -> None:
        """Note how many ``seconds`` are left of a request in a line."""
        name = request.tenant, request.kind, request.urgent
        self._seconds[name] += seconds - request.seconds_left
        request.seconds_left = seconds

    def seconds_before(self, request: Request) -> float:
        """Return the seconds left of the requests before this one, which is in no line yet."""
        name = request.tenant, request.kind, request.urgent
        line = self._lines.get(name)
        if line is None:
            return 0.0
        index = bisect_left(line, BY_DUE(request), key=BY_DUE)
        if 2 * index <= len(line):
            return _seconds_left(line[:index])
        return max(0.0, self._seconds[name] - _seconds_left(line[index:]))

    def delay(self, request: Request, seconds: float) -> bool:
        """Delay the turns of the requests behind this one by ``seconds``, or advance them by a
        negative number; return whether any turn has changed."""
        if not seconds:
            return False
        line = self._lines.get((request.tenant, request.kind, request.urgent), [])
        later = line[bisect_right(line, BY_DUE(request), key=BY_DUE) :]
        for other in later:
            other.backlog = max(0.0, other.backlog + seconds)
            set_turn(other)
        return bool(later)

    def seconds_until(self, turn: float) -> float:
        """Return the seconds left of all requests whose turn is at most ``turn``."""
        due = attrgetter("due")
        heads = [line[: bisect_right(line, turn, key=due)] for line in self._lines.values()]
        return _seconds_left(other for other in chain(*heads) if other.turn <= turn)

    def answers_of(self, tenant: str) -> Iterator[Request]:
        """Yield the tenant's requests for answers."""
        for urgent in (True, False):
            yield from self._lines.get((tenant, ResultKind.ANSWER, urgent), ())

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Check that exactly these ``requests`` are here, in order, and that their seconds are
        summed up. Raises AssertionError otherwise."""
        members = list(chain(*self._lines.values()))
        assert len(members) == len(requests)
        assert set(members) == set(requests)
        assert self._lines.keys() == self._seconds.keys()
        for name, line in self._lines.items():
            assert line
            assert all((each.tenant, each.kind, each.urgent) == name for each in line)
            assert line == sorted(line, key=BY_DUE)
            assert abs(self._seconds[name] - _seconds_left(line)) < 1e-6


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
        """``max_waiting`` is the largest number of requests for answers that wait, ``slo_ttft`` the
        largest number of seconds to the first token that may be predicted for one beside others;
        None for no such limit."""
        self._predict = predict
        self._max_waiting = max_waiting
        self._slo_ttft = slo_ttft
        self._clock = clock
        self.lines = Lines()
        """All requests that are here; the scheduler adds and removes them."""

        self._workflows: OrderedDict[tuple[str, str], tuple[float, float]] = (
            OrderedDict()
        )  # when each began and asked last

    def place(self, request: Request) -> None:
        """Compute the turn, among those that are here, of the request, which arrives now."""
        request.arrived = self._clock()
        request.began = request.arrived if request.workflow is None else self._begin(request)
        request.prompt_seconds = request.seconds_left = self._predict_left(request)
        self._count_backlog(request)

    def place_choice(self, choice: Request, first: Request) -> None:
        """Copy the turn of the first choice of a prompt to another one, and count it."""
        choice.number, choice.arrived, choice.began = first.number, first.arrived, first.began
        choice.backlog, choice.prompt_seconds = first.backlog, first.prompt_seconds
        set_turn(choice)
        self.lines.add(choice)

    def _begin(self, request: Request) -> float:
        """Return when the request's workflow began, but at most ``WORKFLOW_LEAD_SECONDS`` before
        its arrival."""
        assert request.workflow is not None
        now, name = request.arrived, (request.tenant, request.workflow)
        began, last = self._workflows.get(name, (now, now))
        if last < now - WORKFLOW_LEAD_SECONDS:
            began = now
        self._workflows[name] = began, now
        self._workflows.move_to_end(name)
        if len(self._workflows) > WORKFLOW_LIMIT:
            self._workflows.popitem(last=False)
        return max(began, now - WORKFLOW_LEAD_SECONDS)

    def _count_backlog(self, request: Request) -> None:
        set_turn(request)
        request.backlog = self.lines.seconds_before(request)
        set_turn(request)

    def hurry(self, request: Request) -> None:
        """Make the request urgent, and change the turns of its tenant accordingly."""
        self.lines.remove(request)
        self.lines.delay(request, -request.seconds_left)
        request.urgent = True
        self._count_backlog(request)
        self.lines.add(request)
        self.lines.delay(request, request.seconds_left)

    def predict_again(self, request: Request) -> bool:
        """Predict the seconds of the request's prompt again, now that more is known of it, and
        change the turns of its tenant accordingly; return whether others' have changed. Work that
        was done before its turn still counts."""
        self.lines.remove(request)
        has_changed = self.lines.delay(request, -request.seconds_left)
        before = self.lines.seconds_before(request)
        request.prompt_seconds = request.seconds_left = self._predict_left(request)
        set_turn(request)
        after = self.lines.seconds_before(request)
        request.backlog = max(0.0, request.backlog + after - before)
        set_turn(request)
        self.lines.add(request)
        return self.lines.delay(request, request.seconds_left) or has_changed

    def _predict_left(self, request: Request) -> float:
        """Predict the seconds of computing the rest of the request's prompt; 0 if nothing was
        measured."""
        left = request.pending
        return (self._predict(left) or 0.0) if left else 0.0

    def note_progress(self, request: Request) -> None:
        """Predict the seconds left of a request that is here, a part of which is computed now."""
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
        if waiting >= self._max_waiting and any(
            other.waits for other in self.lines.answers_of(request.tenant)
        ):
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
        """Return the requests that may be next of a ``queue`` in order of turns, best first: the
        first whose tenant has none of the requests ``beside``, while others have some; else the
        first of similar turn for which ``prefers`` returns true, if there is one, and the first of
        all."""
        if len(queue) == 1:
            return [queue[0]]
        tenants = {request.tenant for request in beside}
        new = [request for request in queue if request.tenant not in tenants] if tenants else []
        if new:
            return [_first_of_workflow(new[0], queue)]
        similar = [
            request
            for request in queue[:COMPARED_REQUESTS]
            if request.turn <= queue[0].turn + SIMILAR_SECONDS
        ]
        preferred = next(filter(prefers, similar), queue[0])
        found = (_first_of_workflow(request, queue) for request in (preferred, queue[0]))
        return list(dict.fromkeys(found))

    def exchange_turns(self, admitted: Request, queue: Sequence[Request]) -> bool:
        """Where the request went in the place of one of its tenant that is before it in the
        ``queue``, give that one its place, so that the tenant is ahead of no other; return whether
        that was so."""
        if admitted.workflow is None:
            return False
        passed = next((other for other in queue if other.tenant == admitted.tenant), admitted)
        ahead = admitted.turn - passed.turn
        if admitted.began >= passed.began or ahead <= 0:
            return False
        passed.backlog += ahead
        set_turn(passed)
        return True

    def next_answers(self, queue: Sequence[Request], running: Sequence[Request]) -> list[Request]:
        """Return the answers of a ``queue`` that may get slots next, best first, in addition to the
        ``running`` requests; preferred are those that share chunks with these."""
        answers = [request for request in running if request.kind is ResultKind.ANSWER]
        holds = [request.hold.keys for request in running if request.hold is not None]
        used = frozenset(chain(*holds))
        return self.candidates(
            queue, answers, lambda request: not used.isdisjoint(request.chunk_bytes)
        )


def yielding(request: Request, running: Sequence[Request]) -> list[Request]:
    """Return the ``running`` requests, in order of admission, that may free their slots for a
    request whose tenant has nothing running, the best choice first.

    They belong to the tenant that has the most, which keeps one. Each yields once in its life.
    Those without a token yet go first, since their pause is not seen, and then those that were
    admitted last.
    """
    answers = [other for other in running if other.kind is ResultKind.ANSWER]
    places = Counter(other.tenant for other in answers)
    if request.kind is not ResultKind.ANSWER or not places or places[request.tenant]:
        return []
    tenant, _ = places.most_common(1)[0]
    own = [other for other in answers if other.tenant == tenant]
    found = [other for other in reversed(own[1:]) if not other.has_yielded]
    return sorted(
        found, key=lambda other: other.sequence is not None and other.sequence.prompt_in_place
    )


def latest_first(requests: Iterable[Request]) -> list[Request]:
    """Return the requests, those at the ends of their lines first: in this order, each leaves none
    of them behind it whose turn would have to change."""
    entered = [request for request in requests if request.number is not None]
    return sorted(entered, key=BY_DUE, reverse=True)


def _seconds_left(requests: Iterable[Request]) -> float:
    return sum([request.seconds_left for request in requests], start=0.0)


def _first_of_workflow(request: Request, queue: Sequence[Request]) -> Request:
    """Return the request of the same tenant that goes in the place of this one: itself, or one of a
    workflow that began before."""
    own = [
        other
        for other in queue[:COMPARED_REQUESTS]
        if other.tenant == request.tenant and other.workflow is not None
    ]
    return min((request, *own), key=attrgetter("began"))
