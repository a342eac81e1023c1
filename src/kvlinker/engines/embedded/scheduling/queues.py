"""All requests of the embedded engine, each in the queue of its state, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain

from kvlinker.engines.contract.contract import EngineLoad
from kvlinker.engines.embedded.requests.request import Request, RequestState, ResultKind
from kvlinker.engines.embedded.scheduling.admission import Admission
from kvlinker.engines.embedded.scheduling.fetching import FetchQueue
from kvlinker.engines.embedded.scheduling.running import RunningRequests
from kvlinker.engines.embedded.scheduling.turn_queue import TurnQueue, order_of


class RequestQueues:
    """Holds every request that has not ended, and counts them. Only ``Scheduler`` moves requests
    from one queue to another."""

    def __init__(
        self,
        admission: Admission,
        fetches: FetchQueue,
        waiting: dict[ResultKind, TurnQueue],
        running: RunningRequests,
    ) -> None:
        """``admission`` knows all that have not ended, ``fetches`` has those that are LOADING,
        ``waiting`` those that are READY or PREEMPTED, and ``running`` those that are RUNNING."""
        self._lock = threading.Condition()  # the scheduler's one lock: guards everything below
        self.closed = False
        """True once no more requests are accepted."""

        self._admission = admission
        self._fetches = fetches
        self._waiting = waiting
        self._running = running
        self._by_identity: dict[object, Request] = {}

    @property
    def preemptions(self) -> int:
        """The number of times that a request has given its slots up to another."""
        return self._running.preemptions

    def load(self) -> EngineLoad:
        """Return the load at one moment. Requests in the background do not count as running, and
        only requests for answers count as waiting, each once for all of its choices."""
        with self._lock:
            foreground = (
                request.kind is not ResultKind.BACKGROUND for request in self._running.requests
            )
            return EngineLoad(
                running=sum(foreground),
                waiting=self._count_waiting(),
                slots_used=self._running.slots.used,
                slots_total=self._running.slots.total,
                slots_kept=self._running.slots.kept,
            )

    @property
    def loading(self) -> int:
        """The number of requests whose chunks' KV is not there yet."""
        with self._lock:
            return self._fetches.waiting

    @property
    def idle(self) -> bool:
        """True if there is no request at all."""
        with self._lock:
            return not any(True for _ in self._everything())

    def is_alone(self, request: Request) -> bool:
        """Return whether there is nothing to compute, now or later, but this request."""
        with self._lock:
            return all(other is request for other in self._everything())

    def check_integrity(self) -> None:
        """Check that every request is where its state says, and that exactly the running ones hold
        enough slots. Raises AssertionError otherwise."""
        with self._lock:
            self._running.check_integrity()
            for kind, waiting in self._waiting.items():
                assert all(request.kind is kind for request in waiting)
                assert all(
                    request.state in (RequestState.READY, RequestState.PREEMPTED)
                    for request in waiting
                )
                assert all(
                    request.sequence is not None and request.sequence.spans is None
                    for request in waiting
                )
                assert list(waiting) == sorted(waiting, key=order_of)
            everywhere = [*self._running.requests, *chain(*self._waiting.values())]
            assert len(set(everywhere)) == len(everywhere)
            assert not set(everywhere).intersection(self._fetches.requests)
            assert all(
                request.state is not RequestState.FINISHED for request in self._by_identity.values()
            )
            holding = any(request.hold is not None for request in self._everything())
            self._admission.lines.check_integrity(
                [
                    request
                    for request in self._everything()
                    if request.state is not RequestState.FINISHED
                ]
            )
            self._fetches.check_integrity(
                self._waiting[ResultKind.ANSWER], holding=holding or self.closed
            )

    def _everything(self) -> Iterator[Request]:
        """Return all requests that are here, and those that have ended while their KV is
        fetched."""
        return chain(self._running.requests, self._fetches.requests, *self._waiting.values())

    def _count_waiting(self) -> int:
        return self._fetches.waiting + sum(
            request.choice == 0 for request in self._waiting[ResultKind.ANSWER]
        )

    def _disorder(self, kind: ResultKind) -> None:
        """Note that turns of this kind's waiting requests have changed."""
        self._fetches.unfetched.disorder()
        self._waiting[kind].disorder()
