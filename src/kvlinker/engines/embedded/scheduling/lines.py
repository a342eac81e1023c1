"""Keeps requests in lines: those of one tenant, kind and urgency, which wait for each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter

from kvlinker.engines.embedded.requests.request import Request, ResultKind

LineName = tuple[str, ResultKind, bool]
"""What those in one line have in common: tenant, kind and urgency."""


class Lines:
    """Holds the requests that have not ended, each in its line by when it is due, and sums up the
    predicted seconds that are left of them.

    Who comes last, as most do, is entered and counted in a time that does not depend on how many
    are there.
    """

    def __init__(self) -> None:
        self._lines: dict[LineName, _Line] = {}

    def add(self, request: Request) -> None:
        """Put the request into its line. What it is due by, and its urgency, must not change until
        it is taken out."""
        self._lines.setdefault(_name(request), _Line()).add(request)

    def remove(self, request: Request) -> None:
        """Take the request out of its line. Raises KeyError or ValueError where it is in none."""
        name = _name(request)
        line = self._lines[name]
        line.remove(request)
        if not line.members:
            del self._lines[name]

    def note_left(self, request: Request, seconds: float) -> None:
        """Note how many ``seconds`` are left of a request in a line."""
        self._lines[_name(request)].seconds += seconds - request.seconds_left
        request.seconds_left = seconds

    def seconds_before(self, request: Request) -> float:
        """Return the seconds left of those before the request, which is in no line yet."""
        line = self._lines.get(_name(request))
        return 0.0 if line is None else line.seconds_before(request)

    def push_back(self, request: Request, seconds: float) -> bool:
        """Have those after the request wait for so many ``seconds`` more, or less; return whether
        there are any."""
        line = self._lines.get(_name(request))
        return line is not None and line.push_back(request, seconds)

    def seconds_until(self, turn: float) -> float:
        """Return the seconds left of all whose turn comes by then."""
        return sum(line.seconds_until(turn) for line in self._lines.values())

    def answers_of(self, tenant: str) -> Iterator[Request]:
        """Yield the tenant's requests for answers."""
        found = (self._lines.get((tenant, ResultKind.ANSWER, urgent)) for urgent in (True, False))
        return chain.from_iterable(line.members for line in found if line is not None)

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Check that exactly these ``requests`` are here, in order, and that their seconds are
        summed up. Raises AssertionError otherwise."""
        members = [request for line in self._lines.values() for request in line.members]
        assert len(members) == len(requests)
        assert set(members) == set(requests)
        for name, line in self._lines.items():
            assert all(_name(request) == name for request in line.members)
            assert line.members == sorted(line.members, key=_place)
            assert abs(line.seconds - _seconds_left(line.members)) < 1e-6


class _Line:
    """The requests of one line, by place."""

    def __init__(self) -> None:
        self.members: list[Request] = []
        self.seconds = 0.0
        """The seconds left of all members together."""

    def add(self, request: Request) -> None:
        insort(self.members, request, key=_place)
        self.seconds += request.seconds_left

    def remove(self, request: Request) -> None:
        first = bisect_left(self.members, _place(request), key=_place)
        del self.members[self.members.index(request, first)]
        self.seconds -= request.seconds_left

    def seconds_before(self, request: Request) -> float:
        index = bisect_left(self.members, _place(request), key=_place)
        if 2 * index < len(self.members):
            return _seconds_left(self.members[:index])
        return max(0.0, self.seconds - _seconds_left(self.members[index:]))

    def push_back(self, request: Request, seconds: float) -> bool:
        first = bisect_right(self.members, _place(request), key=_place)
        for other in self.members[first:]:
            other.backlog = max(0.0, other.backlog + seconds)
        return first < len(self.members)

    def seconds_until(self, turn: float) -> float:
        due = bisect_right(self.members, turn, key=attrgetter("due"))
        return sum(other.seconds_left for other in self.members[:due] if other.turn <= turn)


def latest_first(requests: Collection[Request]) -> list[Request]:
    """Return the requests, those at the ends of their lines first: whoever leaves in this order
    leaves nobody of them behind, whose turn would have to change."""
    entered = [request for request in requests if request.number is not None]
    return sorted(entered, key=_place, reverse=True)


def _seconds_left(requests: Iterable[Request]) -> float:
    return sum(request.seconds_left for request in requests)


def _name(request: Request) -> LineName:
    return request.tenant, request.kind, request.urgent


def _place(request: Request) -> tuple[float, int]:
    """Return the request's place in its line, as a key to compare."""
    assert request.number is not None
    return request.due, request.number
