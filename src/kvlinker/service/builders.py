"""Builders, which are servers that compute chunks for others: asks them for the KV of chunks that
this server lacks, and computes chunks for others where this server is one.

Only servers that have builders, or are asked as one, import this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

import httpx

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.base.futures import follow_up
from kvlinker.engines.contract.contract import Engine
from kvlinker.store import Catalog, ChunkStore

BUILD = "v1/chunks/build"

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


class BuilderClient:
    """Speaks with builders over HTTP. Methods may be called from any thread."""

    def __init__(self, urls: Callable[[], Sequence[str]], api_key: str | None) -> None:
        """``urls`` returns the addresses of the present builders, which accept ``api_key``, an
        admin's key."""
        self.urls = urls
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(headers=headers, trust_env=False)

    def build(self, url: str, key: str, seconds: float) -> bool:
        """Ask a builder to compute a chunk into the shared tiers; return whether it did. Raises
        TimeoutError if it takes longer than ``seconds``, and ConnectionError if it is gone, or ends
        meanwhile."""
        try:
            answer = self._client.post(f"{url}/{BUILD}", json={"key": key}, timeout=seconds)
        except httpx.ReadTimeout as error:
            raise TimeoutError(f"It has not answered in {seconds:.1f} s.") from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: this client is closed
            raise ConnectionError(repr(error)) from error
        if not answer.is_success:
            logger.info("The builder %s answers %d.", url, answer.status_code)
        return answer.is_success

    def close(self) -> None:
        """End the requests under way."""
        self._client.close()


class Builders:
    """Implementation of ``Elsewhere`` by builders. All servers ask the same builder for a chunk, so
    that it is computed once. Methods may be called from any thread."""

    def __init__(
        self,
        client: BuilderClient,
        store: ChunkStore,
        *,
        kv_bytes: Callable[[int], int],
        least_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``client`` is closed with this. Chunks of fewer than ``least_tokens`` are not asked for;
        ``kv_bytes`` returns the stored bytes of a chunk by its number of tokens."""
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
                seconds = deadline - self._clock()
                if seconds <= 0:
                    return False
                try:
                    if self._client.build(url, key, seconds):
                        return True
                except TimeoutError:  # it computes, and others would take as long
                    return False
                except ConnectionError as error:
                    logger.info("The builder %s is not asked for a while: %s", url, error)
                    self._away_until[url] = self._clock() + AWAY_SECONDS
            return False
        finally:
            self._places.release()


class Building:
    """Computes chunks for other servers. Calls may come from any thread."""

    def __init__(self, engine: Engine, catalog: Catalog, store: ChunkStore) -> None:
        self._engine = engine
        self._catalog = catalog
        self._store = store
        self._thread = ThreadPoolExecutor(1, "kvlinker-building")

    def build(self, chunk_key: str) -> Future[int]:
        """Compute a chunk, where no tier has it. The future has its bytes once the shared tiers
        have it. Raises ContextCacheNotFoundError for a chunk of no context cache of this model."""
        found = self._catalog.chunk(chunk_key)
        if found is None or found[2] != self._engine.fingerprint:
            raise ContextCacheNotFoundError(chunk_key)
        chunk, owner, _ = found

        def share(nbytes: int) -> Future[int]:
            return self._thread.submit(self._share, chunk_key, nbytes)

        return follow_up(self._engine.cache_chunk(chunk, tenant=owner), share)

    def close(self) -> None:
        """Finish the transfers under way."""
        self._thread.shutdown()

    def _share(self, chunk_key: str, nbytes: int) -> int:
        """Bring a chunk to those shared tiers that lack it; returns ``nbytes``."""
        self._store.flush()
        shared = (tier for tier in self._store.slower_tiers() if tier.shared)
        if not all(tier.contains(chunk_key) for tier in shared):
            kv = self._store.get_computed(chunk_key)
            if kv is not None:
                self._store.put(chunk_key, kv)
                self._store.flush()
        return nbytes
