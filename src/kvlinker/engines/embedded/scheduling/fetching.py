"""Keeps the requests whose chunks' KV is not there, and has it fetched for the next of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.engines.embedded.requests.request import Request, RequestState
from kvlinker.engines.embedded.scheduling.admission import Admission
from kvlinker.engines.embedded.scheduling.turn_queue import TurnQueue, order_of
from kvlinker.store.chunk_store import Hold

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
        self.unfetched = TurnQueue()
        """Those whose KV is fetched in their turn."""

        self.fetching: set[Request] = set()
        """Those whose KV is being fetched, until that has come to its end, even if they have ended
        meanwhile."""

        self.late: dict[Request, int] = {}
        """Those that left a step, with the number of layers of their chunks that they wait for."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests here, and those that have ended while their KV is fetched."""
        return (*self.unfetched, *self.fetching, *self.late)

    @property
    def waiting(self) -> int:
        """The number of requests here that have not ended."""
        return sum(request.state is RequestState.LOADING for request in self.requests)

    def remove(self, request: Request) -> None:
        """Take the request out, since it is not LOADING any more; its fetch goes on."""
        self.late.pop(request, None)
        if request in self.unfetched:
            self.unfetched.remove(request)

    def start(self, ready: Sequence[Request]) -> None:
        """Start fetching for the next requests, while few are ahead, ``ready`` ones without slots
        included, and memory has room for their chunks."""
        while self.unfetched and (request := self._next(ready)) is not None:
            self.unfetched.remove(request)
            self.fetching.add(request)
            self._load(request)

    def check_integrity(self, ready: Sequence[Request], *, holding: bool) -> None:
        """Check that requests are LOADING and in one place, and that none waits for a fetch without
        a reason. ``holding`` is true if any request holds chunks. Raises AssertionError
        otherwise."""
        assert list(self.unfetched) == sorted(self.unfetched, key=order_of)
        assert all(
            request.state is RequestState.LOADING for request in (*self.unfetched, *self.late)
        )
        assert self.fetching.isdisjoint(self.unfetched)
        assert self.fetching.isdisjoint(self.late)
        assert self.late.keys().isdisjoint(self.unfetched)
        loading = (
            request
            for request in (*self.fetching, *self.late)
            if request.state is RequestState.LOADING
        )
        assert all(request.hold is not None for request in loading)
        assert not self.unfetched or len(self._ahead(ready)) >= PREFETCHED or holding

    def _ahead(self, ready: Sequence[Request]) -> list[Request]:
        """Return the requests without slots that have KV in memory, or on its way there."""
        return [
            *self.fetching,
            *self.late,
            *(request for request in ready if request.choice == 0),
        ]

    def _next(self, ready: Sequence[Request]) -> Request | None:
        """Return the request to fetch next, which now holds its chunks; None if none may be
        fetched."""
        holding = next((request for request in self.unfetched if request.hold is not None), None)
        if holding is not None:
            # it lost a chunk, and others may wait for the memory of those that it
            # still holds
            return holding
        ahead = self._ahead(ready)
        for request in self._admission.candidates(self.unfetched, ahead, self._is_resident):
            before = sum(other.order <= request.order for other in ahead)
            has_some = any(other.tenant == request.tenant for other in ahead)
            if not has_some or (before < PREFETCHED and len(ahead) < 2 * PREFETCHED):
                request.hold = self._hold(request)
                if request.hold is not None:
                    return request
        return None
