"""The client for ordinary code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class Client:
    """A kvlinker server. Errors are raised as the KVLinkerErrors that ``LLM`` raises."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: httpx.Timeout = TIMEOUT) -> None:
        self._http = httpx.Client(base_url=server_root(base_url), headers=headers(api_key), timeout=timeout)

    def generate_context_cache(self, chunks: Sequence[str], **options: Any) -> tuple[RemoteContextCache, ...]:
        """One context cache per chunk, in order. ``options``: ``ttl``, ``name``, ``metadata``, ``context``."""
        return read_caches(self._send("POST", CACHES, {"chunks": list(chunks), **options}))

    def cache_text(
        self, text: str, *, method: str = "passage", max_tokens: int = 512, **options: Any
    ) -> tuple[RemoteContextCache, ...]:
        """Have the server split a text, and cache its chunks. ``options`` are those of ``generate_context_cache``."""
        split = {"method": method, "max_tokens": max_tokens}
        return read_caches(self._send("POST", CACHES, {"input": text, "split": split, **options}))

    def chat_completion(
        self, messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
    ) -> RemoteAnswer:
        """Answer a conversation. ``sampling`` are fields of the HTTP API, such as ``max_tokens``."""
        return read_answer(self._send("POST", CHAT, chat_body(messages, policy, sampling)))

    def stream_chat_completion(
        self, messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """The answer's text as it is generated; closing the iterator cancels the request."""
        body = chat_body(messages, policy, sampling) | {"stream": True}
        with transport_errors(), self._http.stream("POST", CHAT, content=encode(body), headers=JSON) as response:
            if response.is_error:
                response.read()
                raise error_of(response, body)
            for line in response.iter_lines():
                yield from read_texts(line)

    def explain(self, messages: Sequence[Message], *, policy: str | None = None) -> dict[str, Any]:
        """How a conversation is linked, without answering it; the fields are those of the HTTP API."""
        explanation: dict[str, Any] = (self._send("POST", EXPLAIN, chat_body(messages, policy, {}))).json()
        return explanation

    def expire_cache(self, cache: HasId | str) -> None:
        """Delete a context cache."""
        cache_id = cache if isinstance(cache, str) else cache.id
        self._send("DELETE", f"{CACHES}/{cache_id}", {"id": cache_id})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, method: str, path: str, body: Mapping[str, Any]) -> httpx.Response:
        with transport_errors():
            response = self._http.request(
                method, path, content=encode(body) if method == "POST" else None, headers=JSON
            )
        return checked(response, body)
