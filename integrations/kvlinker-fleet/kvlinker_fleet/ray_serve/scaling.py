"""Computes the number of replicas from the running requests and the time to the first token. Ray
Serve's controller calls it, and keeps its results within bounds and delays."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

REQUESTS = "requests"
TTFT = "ttft"

REMEMBERED_SECONDS = 30.0
"""The age from which a first token does not count any more."""

PERCENTILE = 0.9
"""The share of first tokens that came sooner than the reported time."""

MOST_AT_ONCE = 2.0
"""The factor by which replicas may grow at once because tokens are late."""

ENOUGH = 0.5
"""The share of the target beyond which no replica is removed: fewer would soon be too few."""


class Context(Protocol):
    """The context that Ray Serve gives to a policy."""

    current_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """The figures of ``Load.figures`` by name and replica, averaged over some seconds."""
        ...


class Scaling:
    """Ray Serve's autoscaling policy of a fleet."""

    def __init__(self, target_requests: float, target_ttft: float | None = None) -> None:
        """``target_requests`` are under way in each replica; ``target_ttft`` is in seconds."""
        self._target_requests = target_requests
        self._target_ttft = target_ttft

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Return how many replicas there are to be, and the state that is kept, of which there is
        none."""
        figures = context.aggregated_metrics or {}
        now = context.current_num_replicas
        if not figures.get(REQUESTS):  # no replica has reported anything yet
            return now, {}
        wanted = sum(figures[REQUESTS].values()) / self._target_requests
        late = max(figures.get(TTFT, {}).values(), default=0.0) / (
            self._target_ttft or float("inf")
        )
        if late > 1:
            wanted = max(wanted, now * min(late, MOST_AT_ONCE))
        elif late > ENOUGH:
            wanted = max(wanted, now)
        return wanted, {}


class Load:
    """Measures one replica's load."""

    def __init__(
        self, requests: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``requests`` counts those under way."""
        self._requests = requests
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows: Ray asks in a thread of its own
        self._first_tokens: deque[tuple[float, float]] = deque()  # when, and seconds

    def first_token(self, seconds: float) -> None:
        """Note the time that a request's first token took."""
        with self._lock:
            self._first_tokens.append((self._clock(), seconds))
            self._forget_old()

    def figures(self) -> dict[str, float]:
        """Return how many requests are under way, and the time to the first token in seconds; 0 if
        there was none of late."""
        with self._lock:
            self._forget_old()
            seconds = sorted(each for _, each in self._first_tokens)
        late = seconds[int(PERCENTILE * (len(seconds) - 1))] if seconds else 0.0
        return {REQUESTS: float(self._requests()), TTFT: late}

    def _forget_old(self) -> None:
        oldest = self._clock() - REMEMBERED_SECONDS
        while self._first_tokens and self._first_tokens[0][0] < oldest:
            self._first_tokens.popleft()
