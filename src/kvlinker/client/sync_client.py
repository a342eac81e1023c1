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
    RemotePage,
    cache_path,
    chat_body,
    checked,
    encode,
    error_of,
    headers,
    metadata_query,
    page_query,
    read_answer,
    read_cache,
    read_caches,
    read_page,
    read_texts,
    server_root,
    transport_errors,
)


class Client:
    """A kvlinker server. Errors are raised as the KVLinkerErrors that ``LLM`` raises."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: httpx.Timeout = TIMEOUT) -> None:
        self._http = httpx.Client(base_url=server_root(base_url), headers=headers(api_key), timeout=timeout)

    def generate_context_cache(self, chunks: Sequence[str], **options: Any) -> tuple[RemoteContextCache, ...]:
        """One context cache per chunk, in order.

        ``options``: ``ttl``, ``name``, ``metadata``, ``context``, ``pinned``, ``scope``.
        """
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
        self._send("DELETE", cache_path(cache), {"id": cache_id})

    def expire_caches(self, metadata: Mapping[str, str], *, scope: str = "private") -> int:
        """Delete all context caches that have all these pairs of metadata; returns how many."""
        query = metadata_query(metadata) | {"scope": scope}
        deleted: int = (self._send("DELETE", CACHES, query=query)).json()["deleted"]
        return deleted

    def update_cache(self, cache: HasId | str, **changes: Any) -> RemoteContextCache:
        """Change ``ttl``, ``expires_at``, ``name``, ``metadata`` or ``pinned``; None removes."""
        cache_id = cache if isinstance(cache, str) else cache.id
        return read_cache((self._send("PATCH", cache_path(cache), changes, at={"id": cache_id})).json())

    def list_caches(
        self,
        *,
        limit: int = 20,
        after: HasId | str | None = None,
        order: str = "desc",
        metadata: Mapping[str, str] | None = None,
        scope: str = "private",
    ) -> RemotePage:
        """At most ``limit`` context caches by time of creation, those behind ``after``.

        Only those with all pairs of ``metadata``; ``scope``: one's own ("private"), or the shared ones ("shared").
        """
        return read_page(self._send("GET", CACHES, query=page_query(limit, after, order, metadata, scope)))

    def caches_usage(self, *, scope: str = "private") -> dict[str, Any]:
        """How many context caches there are, what their KV takes, and the quota, in the fields of the HTTP API."""
        usage: dict[str, Any] = (self._send("GET", f"{CACHES}/usage", query={"scope": scope})).json()
        return usage

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """``at``: where the values lie that an error's ``param`` names, if not in the body."""
        content = encode(body) if body is not None and method in ("POST", "PATCH") else None
        with transport_errors():
            response = self._http.request(method, path, content=content, params=query, headers=JSON)
        return checked(response, at or body or {})
