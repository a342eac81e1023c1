"""The last requests and how their prompts were computed, and what other settings would have spared;
for /status and the log."""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvlinker.doors.http.fields.server_status import RecentRequest

MOST_KEPT = 256
"""The most requests that are remembered, of all tenants together."""

MOST_SHOWN = 20
"""The most requests that a caller is shown."""

LEAST_REUSABLE = 1024
"""The tokens that other settings would have found cached, after which the log says so: fewer are
computed in a second or so."""

logger = logging.getLogger(__name__)


class RecentRequests:
    """Remembers the last requests, each tenant's for itself and for admins. Methods may be called
    from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: deque[tuple[str, RecentRequest]] = deque(maxlen=MOST_KEPT)
        self._prompt_tokens = 0
        self._is_said = False
        self.reusable = 0
        """The tokens since the start that would have been cached with ``implicit = "auto"``."""

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
