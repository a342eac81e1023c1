"""Requests whose chunks' KV is being fetched: from their arrival until the engine's thread takes them over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from kvlinker.embedded.commands import CommandQueue
from kvlinker.embedded.link_loading import LinkLoader, LoadedLink
from kvlinker.embedded.linked_request import LinkedRequest
from kvlinker.embedded.scheduler import Scheduler
from kvlinker.engine.limits import check_room
from kvlinker.errors import KVLinkerError
from kvlinker.futures import gather

logger = logging.getLogger(__name__)

PREFETCHED = 8
"""Requests in the queue whose chunks' KV is held ready; those behind them fetch it later."""

Ready = Callable[[LinkedRequest, LoadedLink], None]
"""Takes a request whose chunks' KV is there. It runs in the thread that completed it; what it raises fails the
request."""


class Admission:
    """Limits how many requests wait, and for how many of them KV is fetched ahead.

    A request *loads* from ``admit`` until somebody's ``take`` of it succeeds. Exactly one does, and then queues,
    cancels or fails the request. All methods may be called from any thread. Nobody else's code runs under the lock,
    but for the check whether the commands are closed. As that is asked under it, and ``fail_all`` takes it after the
    closing, a request that comes meanwhile is either refused or failed.
    """

    def __init__(
        self,
        links: LinkLoader,
        scheduler: Scheduler,
        commands: CommandQueue,
        loaders: Executor,
        *,
        max_waiting: int,
    ) -> None:
        """``scheduler``: its queue comes behind this one. ``commands``: once they are closed, nothing is admitted."""
        self._links = links
        self._scheduler = scheduler
        self._commands = commands
        self._loaders = loaders
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._loading: set[LinkedRequest] = set()  # guarded by _changed
        self._fetching = 0  # how many of them are; guarded by _changed

    @property
    def waiting(self) -> int:
        """Requests that wait for their KV or for their first step."""
        with self._changed:
            return self._scheduler.waiting + len(self._loading)

    def admit(self, request: LinkedRequest, ready: Ready) -> None:
        """Fetch the request's KV, and call ``ready``. Raises OverloadedError and EngineClosedError."""
        with self._changed:
            self._commands.check_open()
            waiting = self._scheduler.waiting + len(self._loading)
            check_room(waiting, 1, most=self._max_waiting)
            self._load_soon(request, ready)

    def admit_again(self, request: LinkedRequest, ready: Ready) -> None:
        """A request that was taken has lost its KV. The engine's thread calls this: it ends before the loaders do."""
        with self._changed:
            self._load_soon(request, ready)

    def take(self, request: LinkedRequest) -> bool:
        """Whether the caller is the one to go on with the request: it may have been cancelled meanwhile."""
        with self._changed:
            if request not in self._loading:
                return False
            self._loading.remove(request)
            return True

    def proceed(self) -> None:
        """The scheduler's queue may be shorter now."""
        with self._changed:
            self._changed.notify_all()

    def fail_all(self, error: KVLinkerError) -> None:
        """The commands are closed: give up all requests that load."""
        with self._changed:
            loading = tuple(self._loading)
            self._changed.notify_all()
        for request in loading:
            self._fail(request, error)

    def _load_soon(self, request: LinkedRequest, ready: Ready) -> None:
        self._loading.add(request)
        self._loaders.submit(self._load, request, ready)

    def _load(self, request: LinkedRequest, ready: Ready) -> None:
        """Runs in a loader: fetch the KV of the chunks to place, computing what the store lost, then hand it over."""
        try:
            if not self._begin_fetching(request):
                return
        except KVLinkerError as error:
            self._fail(request, error)
            return
        try:
            linked = self._links.link(request.request, at_hand=request.lost_before)
            handed_over = gather([linked], lambda links: ready(request, links[0]))
        except Exception as error:
            self._fetched(request, error)
        else:
            handed_over.add_done_callback(lambda done: self._fetched(request, done.exception()))

    def _begin_fetching(self, request: LinkedRequest) -> bool:
        """Wait until the queue is short enough; False when the request was cancelled. Raises EngineClosedError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._commands.closed or self._scheduler.waiting + self._fetching < PREFETCHED
            )
            self._commands.check_open()
            if request not in self._loading:
                return False
            self._fetching += 1
            return True

    def _fetched(self, request: LinkedRequest, error: BaseException | None) -> None:
        with self._changed:
            self._fetching -= 1
            self._changed.notify_all()
        if error is not None:
            self._fail(request, error)

    def _fail(self, request: LinkedRequest, error: BaseException) -> None:
        if not self.take(request):
            return
        if not isinstance(error, KVLinkerError):
            logger.error("Loading a request's chunks failed.", exc_info=error)
            error = KVLinkerError("The request's chunks could not be loaded; see the server's log.")
        request.fail(error)
