"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from kvlinker.client.wire import (
    CACHES,
    CHAT,
    EXPLAIN,
    JSON,
    TIMEOUT,
    HasId,
    Message,
    RemoteAnswer,
    RemoteContextCache,
    chat_body,
    checked,
    encode,
    error_of,
    headers,
    read_answer,
    read_caches,
    read_texts,
    server_root,
    transport_errors,
)


class AsyncClient:
    """``Client`` for asyncio."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: httpx.Timeout = TIMEOUT) -> None:
        self._http = httpx.AsyncClient(base_url=server_root(base_url), headers=headers(api_key), timeout=timeout)

    async def generate_context_cache(self, chunks: Sequence[str], **options: Any) -> tuple[RemoteContextCache, ...]:
        """One context cache per chunk, in order. ``options``: ``ttl``, ``name``, ``metadata``, ``context``."""
        return read_caches(await self._send("POST", CACHES, {"chunks": list(chunks), **options}))

    async def cache_text(
        self, text: str, *, method: str = "passage", max_tokens: int = 512, **options: Any
    ) -> tuple[RemoteContextCache, ...]:
        """Have the server split a text, and cache its chunks. ``options`` are those of ``generate_context_cache``."""
        split = {"method": method, "max_tokens": max_tokens}
        return read_caches(await self._send("POST", CACHES, {"input": text, "split": split, **options}))

    async def chat_completion(
        self, messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
    ) -> RemoteAnswer:
        """Answer a conversation. ``sampling`` are fields of the HTTP API, such as ``max_tokens``."""
        return read_answer(await self._send("POST", CHAT, chat_body(messages, policy, sampling)))

    async def stream_chat_completion(
        self, messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
    ) -> AsyncIterator[str]:
        """The answer's text as it is generated; closing the iterator cancels the request."""
        body = chat_body(messages, policy, sampling) | {"stream": True}
        with transport_errors():
            async with self._http.stream("POST", CHAT, content=encode(body), headers=JSON) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response, body)
                async for line in response.aiter_lines():
                    for text in read_texts(line):
                        yield text

    async def explain(self, messages: Sequence[Message], *, policy: str | None = None) -> dict[str, Any]:
        """How a conversation is linked, without answering it; the fields are those of the HTTP API."""
        explanation: dict[str, Any] = (await self._send("POST", EXPLAIN, chat_body(messages, policy, {}))).json()
        return explanation

    async def expire_cache(self, cache: HasId | str) -> None:
        """Delete a context cache."""
        cache_id = cache if isinstance(cache, str) else cache.id
        await self._send("DELETE", f"{CACHES}/{cache_id}", {"id": cache_id})

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, method: str, path: str, body: Mapping[str, Any]) -> httpx.Response:
        with transport_errors():
            response = await self._http.request(
                method, path, content=encode(body) if method == "POST" else None, headers=JSON
            )
        return checked(response, body)
