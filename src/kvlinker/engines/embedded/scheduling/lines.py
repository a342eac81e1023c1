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

    A request that comes last in its line, as most do, is entered and counted in a time that grows
    with the logarithm of the line's length. One that comes earlier moves those behind it.
    """

    def __init__(self) -> None:
        self._lines: dict[LineName, list[Request]] = {}
        self._seconds: dict[LineName, float] = {}  # left of all in a line together

    def add(self, request: Request) -> None:
        """Put the request into its line. What it is due by, and its urgency, must not change until
        it is taken out."""
        name = _name(request)
        insort(self._lines.setdefault(name, []), request, key=_place)
        self._seconds[name] = self._seconds.get(name, 0.0) + request.seconds_left

    def remove(self, request: Request) -> None:
        """Take the request out of its line. Raises KeyError or ValueError where it is in none."""
        name = _name(request)
        line = self._lines[name]
        del line[line.index(request, bisect_left(line, _place(request), key=_place))]
        self._seconds[name] -= request.seconds_left
        if not line:
            del self._lines[name], self._seconds[name]

    def note_left(self, request: Request, seconds: float) -> None:
        """Note how many ``seconds`` are left of a request in a line."""
        self._seconds[_name(request)] += seconds - request.seconds_left
        request.seconds_left = seconds

    def seconds_before(self, request: Request) -> float:
        """Return the seconds left of those before the request, which is in no line yet."""
        line = self._lines.get(_name(request), [])
        index = bisect_left(line, _place(request), key=_place)
        if 2 * index <= len(line):
            return _seconds_left(line[:index])
        return max(0.0, self._seconds[_name(request)] - _seconds_left(line[index:]))

    def push_back(self, request: Request, seconds: float) -> bool:
        """Have those after the request wait for so many ``seconds`` more, or less; return whether
        there are any."""
        line = self._lines.get(_name(request), [])
        later = line[bisect_right(line, _place(request), key=_place) :]
        for other in later:
            other.backlog = max(0.0, other.backlog + seconds)
        return bool(later)

    def seconds_until(self, turn: float) -> float:
        """Return the seconds left of all whose turn comes by then."""
        due = (
            line[: bisect_right(line, turn, key=attrgetter("due"))] for line in self._lines.values()
        )
        return _seconds_left(other for other in chain.from_iterable(due) if other.turn <= turn)

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
            assert all(_name(request) == name for request in line)
            assert line == sorted(line, key=_place)
            assert abs(self._seconds[name] - _seconds_left(line)) < 1e-6


def latest_first(requests: Collection[Request]) -> list[Request]:
    """Return the requests, those at the ends of their lines first: whoever leaves in this order
    leaves nobody of them behind, whose turn would have to change."""
    entered = [request for request in requests if request.number is not None]
    return sorted(entered, key=_place, reverse=True)


def _seconds_left(requests: Iterable[Request]) -> float:
    return sum((request.seconds_left for request in requests), start=0.0)


def _name(request: Request) -> LineName:
    return request.tenant, request.kind, request.urgent


def _place(request: Request) -> tuple[float, int]:
    """Return the request's place in its line, as a key to compare."""
    assert request.number is not None
    return request.due, request.number
