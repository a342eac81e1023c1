"""Orders concurrent requests for embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvlinker.engines.contract.limits import check_room
from kvlinker.service.embedding import Embedder, EmbeddingRequest


class EmbeddingTurns:
    """Lets tenants embed in turns, a batch each, and refuses requests beyond the number that may
    wait. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request until the block ends. Raises OverloadedError."""
        check_room(self._open, 1, most=self._most)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def embed(
        self, embedder: Embedder, asked: EmbeddingRequest, tenant: str
    ) -> NDArray[np.float32]:
        """Return the vectors [texts, dimensions] of a request. Cancelling it leaves out the batches
        that are still to come."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        vectors = np.empty(
            (sum(len(batch.texts) for batch in asked.batches), embedder.dimensions), np.float32
        )
        for batch in asked.batches:
            async with turn:
                computed = await asyncio.wrap_future(embedder.submit(asked, batch))
            vectors[batch.places] = computed
        return vectors
