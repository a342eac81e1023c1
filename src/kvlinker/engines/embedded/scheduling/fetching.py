"""Keeps the requests whose chunks' KV is not there, and has it fetched for the next of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.engines.embedded.requests.request import Request, RequestState
from kvlinker.engines.embedded.scheduling.admission import Admission
from kvlinker.engines.embedded.scheduling.turn_queue import TurnQueue, order_of
from kvlinker.store.holds import Hold

PREFETCHED = 8
"""The number of waiting requests whose chunks' KV is fetched ahead of those after them; twice as
many in all, and one of each tenant."""


class FetchQueue:
    """Holds requests that are LOADING: not fetched yet, being fetched, or waiting for late layers.

    From when its fetch begins until it ends, a request holds its chunks in memory; while there is
    no room for those of the next one, it waits, and so do those after it, but for requests of
    similar turns whose chunks are in memory.

    The scheduler calls all methods under its lock.
    """

    def __init__(
        self,
        admission: Admission,
        load: Callable[[Request], object],
        *,
        hold: Callable[[Request], Hold | None],
        is_resident: Callable[[Request], bool],
    ) -> None:
        """``load`` starts fetching a request's KV in another thread; ``hold`` makes room in memory
        for it before, or returns None if there is none now; ``is_resident`` returns whether all of
        its chunks are in memory."""
        self._admission = admission
        self._load = load
        self._hold = hold
        self._is_resident = is_resident
        self._unfetched = TurnQueue()
        self._fetching: set[Request] = (
            set()
        )  # until their loads report, even if they have ended meanwhile
        self._late: dict[Request, int] = {}  # with the number of layers that they wait for

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests here, and those that have ended while their KV is fetched."""
        return (*self._unfetched, *self._fetching, *self._late)

    @property
    def waiting(self) -> int:
        """The number of requests here that have not ended."""
        return sum(request.state is RequestState.LOADING for request in self.requests)

    def add(self, request: Request) -> None:
        """Have the request's KV fetched in its turn."""
        self._unfetched.add(request)

    def disorder(self) -> None:
        """Note that turns of requests may have changed."""
        self._unfetched.disorder()

    def wait_for_layers(self, request: Request, layers: int) -> None:
        """Keep the request, which left a step, until so many layers of its chunks are there."""
        self._late[request] = layers

    def layers_wanted(self, request: Request) -> int | None:
        """Return the number of layers that the request waits for; None if it does not."""
        return self._late.get(request)

    def report(self, request: Request) -> None:
        """Note that the request's fetch has come to its end."""
        self._fetching.discard(request)

    def remove(self, request: Request) -> None:
        """Take the request out, since it is not LOADING any more; its fetch goes on until it
        reports."""
        self._late.pop(request, None)
        if request in self._unfetched:
            self._unfetched.remove(request)

    def start(self, ready: Sequence[Request]) -> None:
        """Start fetching for the next requests, while few are ahead, ``ready`` ones without slots
        included, and memory has room for their chunks."""
        while self._unfetched and (request := self._next(ready)) is not None:
            self._unfetched.remove(request)
            self._fetching.add(request)
            self._load(request)

    def check_integrity(self, ready: Sequence[Request], *, holding: bool) -> None:
        """Check that requests are LOADING and in one place, and that none waits for a fetch without
        a reason. ``holding`` is true if any request holds chunks. Raises AssertionError
        otherwise."""
        assert list(self._unfetched) == sorted(self._unfetched, key=order_of)
        assert all(
            request.state is RequestState.LOADING for request in (*self._unfetched, *self._late)
        )
        assert self._fetching.isdisjoint(self._unfetched)
        assert self._fetching.isdisjoint(self._late)
        assert self._late.keys().isdisjoint(self._unfetched)
        loading = (
            request
            for request in (*self._fetching, *self._late)
            if request.state is RequestState.LOADING
        )
        assert all(request.hold is not None for request in loading)
        assert not self._unfetched or len(self._ahead(ready)) >= PREFETCHED or holding

    def _ahead(self, ready: Sequence[Request]) -> list[Request]:
        """Return the requests without slots that have KV in memory, or on its way there."""
        return [
            *self._fetching,
            *self._late,
            *(request for request in ready if request.choice == 0),
        ]

    def _next(self, ready: Sequence[Request]) -> Request | None:
        """Return the request to fetch next, which now holds its chunks; None if none may be
        fetched."""
        holding = next((request for request in self._unfetched if request.hold is not None), None)
        if holding is not None:
            # it lost a chunk, and others may wait for the memory of those that it
            # still holds
            return holding
        ahead = self._ahead(ready)
        for request in self._admission.candidates(self._unfetched, ahead, self._is_resident):
            before = sum(other.order <= request.order for other in ahead)
            has_some = any(other.tenant == request.tenant for other in ahead)
            if not has_some or (before < PREFETCHED and len(ahead) < 2 * PREFETCHED):
                request.hold = self._hold(request)
                if request.hold is not None:
                    return request
        return None
