"""The requests of now and the last ones, how their prompts were computed, and what other settings
would have spared; for /status and the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from weakref import WeakSet

from kvlinker.doors.http.answers.choices import Choices
from kvlinker.doors.http.fields.server_status import RecentRequest, RunningRequest

MOST_KEPT = 256
"""The most requests that are remembered, of all tenants together."""

MOST_SHOWN = 20
"""The most requests that a caller is shown."""

LEAST_REUSABLE = 1024
"""The tokens that other settings would have found cached, after which the log says so: fewer are
computed in a second or so."""

logger = logging.getLogger(__name__)


class RecentRequests:
    """Knows the requests that are being answered, and the last ones, each tenant's for itself and
    for admins. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: WeakSet[Choices] = WeakSet()
        self._requests: deque[tuple[str, RecentRequest]] = deque(maxlen=MOST_KEPT)
        self._prompt_tokens = 0
        self._is_said = False
        self.reusable = 0
        """The tokens since the start that would have been cached with ``implicit = "auto"``."""

    def begin(self, choices: Choices) -> None:
        """Count a request as running until its choices have ended."""
        with self._lock:
            self._running.add(choices)

    def running(self, tenant: str | None) -> list[RunningRequest]:
        """Return a tenant's requests that are being answered, the last one first; None for those of
        all."""
        now = time.monotonic()
        with self._lock:
            begun = [choices for choices in self._running if not choices.ended]
        shown = [each for each in begun if tenant in (None, each.tenant)]
        return [
            RunningRequest(
                tenant=each.tenant,
                policy=next(iter(each.prompts.values())).policy.name,
                seconds=round(now - each.began, 1),
                prompt_tokens=sum(len(read.prompt) for read in each.prompts.values()),
                output_tokens=each.output_tokens,
            )
            for each in sorted(shown, key=lambda each: each.began, reverse=True)[:MOST_SHOWN]
        ]

    def add(self, tenant: str, request: RecentRequest) -> None:
        """Remember a request that has ended; say once in the log if other settings would spare
        much."""
        with self._lock:
            self._requests.append((tenant, request))
            self.reusable += request.reusable
            self._prompt_tokens += request.cached + request.recomputed + request.fresh
            says = self.reusable >= LEAST_REUSABLE and not self._is_said
            self._is_said = self._is_said or says
        if says:
            logger.info(
                "Of %d prompt tokens so far, %d stood in earlier prompts at another place, and were"
                " computed again. With --implicit auto (KVLINKER_IMPLICIT=auto) they are found.",
                self._prompt_tokens,
                self.reusable,
            )

    def of(self, tenant: str | None) -> list[RecentRequest]:
        """Return a tenant's last requests, the last one first; None for those of all."""
        with self._lock:
            kept = list(self._requests)
        shown = [request for owner, request in reversed(kept) if tenant in (None, owner)]
        return shown[:MOST_SHOWN]
