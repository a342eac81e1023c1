"""Requests the KV of chunks that this server lacks from builders, which are other servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

from kvlinker.store import ChunkStore

LEAST_PATIENCE = 1.0
"""The seconds after which a builder is given up, at least."""

PATIENCE = 3.0
"""The most time that a builder may take for a chunk, as a multiple of computing it here."""

UNMEASURED_SECONDS = 10.0
"""The patience until the speed of computing here was measured."""

AWAY_SECONDS = 5.0
"""The seconds for which a builder that does not answer is not asked."""

MOST_ASKED = 16
"""The most chunks that are asked for at a time; more are computed here."""

logger = logging.getLogger(__name__)


class BuilderClient(Protocol):
    """Speaks with builders. Methods may be called from any thread."""

    def urls(self) -> Sequence[str]:
        """Return the addresses of the builders that there are now."""
        ...

    def build(self, url: str, key: str, seconds: float) -> bool:
        """Have a builder compute a chunk into the shared tiers, and return whether it has done so.
        Raises TimeoutError if it takes longer than ``seconds``, and ConnectionError if it is gone,
        or ends meanwhile."""
        ...

    def close(self) -> None:
        """End the calls under way, which then raise ConnectionError."""
        ...


class Builders:
    """Is ``Elsewhere``. Each chunk is asked for at one builder, the same for all servers, so that
    it is computed once. Methods may be called from any thread."""

    def __init__(
        self,
        client: BuilderClient,
        store: ChunkStore,
        *,
        kv_bytes: Callable[[int], int],
        least_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``client`` belongs to this. Chunks of fewer than ``least_tokens`` are not asked for;
        ``kv_bytes`` counts the bytes that are stored of a chunk of so many tokens."""
        self._client = client
        self._store = store
        self._kv_bytes = kv_bytes
        self._least_tokens = least_tokens
        self._clock = clock
        self._away_until: dict[str, float] = {}
        self._places = threading.Semaphore(MOST_ASKED)
        self._threads = ThreadPoolExecutor(MOST_ASKED, "kvlinker-builders")

    def ask(self, key: str, tokens: int, seconds: float | None) -> Future[bool] | None:
        shared = next((tier for tier in self._store.slower_tiers() if tier.shared), None)
        if tokens < self._least_tokens or shared is None:
            return None
        if seconds is not None and not self._store.bandwidths.worth_loading(
            shared.name, self._kv_bytes(tokens), seconds
        ):
            return None
        now = self._clock()
        urls = [url for url in self._client.urls() if self._away_until.get(url, 0.0) <= now]
        if not urls or not self._places.acquire(blocking=False):
            return None
        patience = UNMEASURED_SECONDS if seconds is None else PATIENCE * seconds
        urls.sort(key=lambda url: sha256(f"{url} {key}".encode()).digest())
        try:
            return self._threads.submit(self._ask, key, urls, now + max(LEAST_PATIENCE, patience))
        except RuntimeError:  # it is closed
            return None

    def close(self) -> None:
        self._client.close()  # which ends the calls under way
        self._threads.shutdown()

    def _ask(self, key: str, urls: Sequence[str], deadline: float) -> bool:
        """Ask one builder after the other, while there is time; returns whether one has done it."""
        try:
            for url in urls:
                left = deadline - self._clock()
                if left <= 0:
                    return False
                try:
                    if self._client.build(url, key, left):
                        return True
                except TimeoutError:  # it computes, and others would take as long
                    return False
                except ConnectionError as error:
                    logger.info("The builder %s is not asked for a while: %s", url, error)
                    self._away_until[url] = self._clock() + AWAY_SECONDS
            return False
        finally:
            self._places.release()
