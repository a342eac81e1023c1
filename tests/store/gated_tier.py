"""A slow tier whose reads and writes the tests hold up and let go, for the orders of events that
matter."""

from __future__ import annotations

import threading

from kvlinker.base.events import Events
from kvlinker.store import ChunkKV, HostTier
from kvlinker.store.throttle import Rest, no_rest

TIMEOUT = 10.0


class Gate:
    """Closed, callers wait in ``enter``; ``let_one_through`` and ``open`` free them."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._reached = threading.Semaphore(0)

    def enter(self) -> None:
        if not self._is_open:
            self._reached.release()
            assert self._permits.acquire(timeout=TIMEOUT), "nobody opened the gate"

    def let_one_through(self) -> None:
        self._permits.release()

    def open(self) -> None:
        """For those that come, and the one that may wait."""
        self._is_open = True
        self._permits.release()

    def close(self) -> None:
        self._is_open = False
        while self._permits.acquire(blocking=False):
            pass

    def wait_for_a_caller(self) -> None:
        assert self._reached.acquire(timeout=TIMEOUT), "nobody came to the gate"


class GatedTier(HostTier):
    """A host tier, named "slow", behind gates: a put stores after its gate; a get has looked before
    its gate."""

    def __init__(self, budget_bytes: int, events: Events) -> None:
        super().__init__(budget_bytes, events, name="slow")
        self.put_gate = Gate()
        self.get_gate = Gate()
        self.get_gate.open()
        self.finished_puts = threading.Semaphore(0)

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        self.put_gate.enter()
        stored = super().put(key, kv)
        self.finished_puts.release()
        return stored

    def get(self, key: str) -> ChunkKV | None:
        kv = super().get(key)
        self.get_gate.enter()
        return kv

    def close(self) -> None:
        """Keeps its content, as a persistent tier does."""
