"""Holds the documents that users ask about: context caches of one server, replaced by new ones all
the time."""

from __future__ import annotations

import asyncio

import numpy as np

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.doors.client import AsyncClient
from kvlinker_lab.load.traffic import random_text

EXPIRING_SECONDS = 5
"""The time to live of documents that are left to expire."""


class Library:
    """Keeps a number of documents on a server, under their numbers from 0 on."""

    def __init__(self, client: AsyncClient, size: int, characters: int, *, seed: int) -> None:
        """``characters`` is the length of each document. Call ``fill`` before anything else."""
        self.ids: list[str] = []
        """The ids of the context caches that the documents have now."""
        self.texts: list[str] = []
        """The documents' texts."""
        self.gone: set[str] = set()
        """The ids of context caches that were deleted, or left to expire: asking for them may
        fail."""
        self._client = client
        self._size = size
        self._characters = characters
        self._generator = np.random.default_rng([seed, 0])

    async def fill(self) -> None:
        """Upload all documents. Raises what the client raises."""
        for _ in range(self._size):
            text, cache_id = await self._upload()
            self.texts.append(text)
            self.ids.append(cache_id)

    async def replace(self) -> str | None:
        """Put a new document in the place of any; return what went wrong, or None.

        Every other one of those that go is deleted, and has to be gone at once; the others are left
        to expire.
        """
        place = int(self._generator.integers(self._size))
        text, cache_id = await self._upload()
        old, self.ids[place], self.texts[place] = self.ids[place], cache_id, text
        self.gone.add(old)
        if self._generator.random() < 0.5:
            await self._client.update_cache(old, ttl=EXPIRING_SECONDS)
            return None
        await self._client.expire_cache(old)
        try:
            await self._client.read_cache(old)
        except ContextCacheNotFoundError:
            return None
        return f"{old} was deleted, and can still be read"

    async def clear(self) -> None:
        """Delete all context caches of the server's caller, those that nobody named by an id
        included."""
        while (page := await self._client.list_caches(limit=100)).items:
            await asyncio.gather(*(self._delete(cache.id) for cache in page.items))

    async def _delete(self, cache_id: str) -> None:
        """Delete a context cache, unless it has just expired."""
        try:
            await self._client.expire_cache(cache_id)
        except ContextCacheNotFoundError:
            return

    async def _upload(self) -> tuple[str, str]:
        text = random_text(self._generator, self._characters)
        (cache,) = await self._client.generate_context_cache([text])
        return text, cache.id
