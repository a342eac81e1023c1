"""The calls of a kvlinker server: each is described once, as a request and the reader of its
answer.

``Client`` and ``AsyncClient`` send the requests that these functions describe; the functions
themselves do no input or output. Their signatures and docstrings are those of the clients' methods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import httpx

from kvlinker.base.errors import ContextCacheNotFoundError, InvalidRequestError
from kvlinker.base.types.texts import CacheContent, Piece, SearchHit
from kvlinker.doors.client.wire import (
    RemoteAnswer,
    RemoteContextCache,
    RemotePage,
    answers_of_others,
    error_of,
    read_answer,
    read_caches,
    read_content,
    read_context_cache,
    read_hits,
    read_page,
    read_pieces,
)

T = TypeVar("T")

CACHES = "v1/context_caches"
CHAT = "v1/chat/completions"
EXPLAIN = "v1/link/explain"


class HasId(Protocol):
    """A context cache, from the client or from ``LLM``."""

    @property
    def id(self) -> str: ...


Message = Mapping[str, Any]
"""``role`` and ``content``, which is text or a list of texts, context caches and the API's own
parts."""


@dataclass(frozen=True, slots=True)
class HttpCall(Generic[T]):
    """Describes a request, and how its answer is read.

    ``named``: the values that an error's ``param`` may name, where they are not in the body.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] | None = None
    named: Mapping[str, Any] | None = None

    def request(self) -> dict[str, Any]:
        """Return the arguments of httpx's ``request``. Raises InvalidRequestError for values that
        are not JSON."""
        return {
            "method": self.method,
            "url": self.path,
            "params": self.query,
            "content": None if self.body is None else _encoded(self.body),
            "headers": {"Content-Type": "application/json"},
        }

    def result(self, response: httpx.Response) -> T:
        """Return the call's result. Raises the error that the response describes, and
        ServerUnreachableError for an answer that is no server's of kvlinker."""
        if response.is_error:
            raise error_of(response, self.named or self.body or {})
        with answers_of_others():
            if not response.is_success:
                raise ValueError(f"it redirects from {response.url}")
            return self.read(response)


def generate_context_cache(
    chunks: str | Sequence[str], **options: Any
) -> HttpCall[tuple[RemoteContextCache, ...]]:
    """Create one context cache per chunk, in order. A string is one chunk.

    ``options``: ``ttl``, ``name``, ``metadata`` (of all, or a list with one for each), ``context``,
    ``pinned``, ``scope``.
    """
    return HttpCall(
        "POST",
        CACHES,
        read_caches,
        {"chunks": [chunks] if isinstance(chunks, str) else _listed(chunks), **options},
    )


def cache_text(
    text: str, *, method: str = "passage", max_tokens: int = 512, **options: Any
) -> HttpCall[tuple[RemoteContextCache, ...]]:
    """Split a text on the server, and cache its chunks. ``options`` are those of
    ``generate_context_cache``."""
    split = {"method": method, "max_tokens": max_tokens}
    return HttpCall("POST", CACHES, read_caches, {"input": text, "split": split, **options})


def split_text(
    text: str, *, method: str = "passage", max_tokens: int = 512
) -> HttpCall[tuple[Piece, ...]]:
    """Return the chunks into which the server would split a text; nothing is cached."""
    body = {"input": text, "split": {"method": method, "max_tokens": max_tokens}}
    return HttpCall("POST", f"{CACHES}/split", lambda response: read_pieces(response, text), body)


def search(
    query: str,
    *,
    limit: int = 10,
    metadata: Mapping[str, str] | None = None,
    scope: str = "private",
) -> HttpCall[tuple[SearchHit, ...]]:
    """Find context caches by words of their texts, the best match first; the hits stand in message
    content.

    Only those with all pairs of ``metadata``; ``scope``: one's own ("private"), or the shared ones
    ("shared").
    """
    body = {"query": query, "limit": limit, "metadata": dict(metadata or {}), "scope": scope}
    return HttpCall("POST", f"{CACHES}/search", read_hits, body)


def read_cache(cache: HasId | str) -> HttpCall[CacheContent]:
    """Read a context cache's text and token ids."""
    return HttpCall(
        "GET", f"{_cache_path(cache)}/content", read_content, named={"id": _id_of(cache)}
    )


def server_status() -> HttpCall[dict[str, Any]]:
    """Return the server's load and fill levels, in the fields of the HTTP API."""
    return HttpCall("GET", "status", _read_json)


def server_metrics() -> HttpCall[str]:
    """Return the server's metrics, in Prometheus' text format."""
    return HttpCall("GET", "metrics", lambda response: response.text)


def chat_completion(
    messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
) -> HttpCall[RemoteAnswer]:
    """Answer a conversation. ``sampling`` are fields of the HTTP API, such as ``max_tokens``."""
    return HttpCall("POST", CHAT, read_answer, _chat_body(messages, policy, sampling))


def stream_chat_completion(
    messages: Sequence[Message], policy: str | None, sampling: Mapping[str, Any]
) -> HttpCall[None]:
    """Answer a conversation as a stream of events, which the clients read themselves. Raises
    InvalidRequestError for tools, whose calls are no text."""
    if sampling.get("tools") and sampling.get("tool_choice") != "none":
        raise InvalidRequestError(
            "A stream gives the answer's text alone, in which no calls of 'tools' are: leave out"
            " 'stream', or 'tools'.",
            param="stream",
        )
    return HttpCall(
        "POST", CHAT, lambda _: None, _chat_body(messages, policy, sampling) | {"stream": True}
    )


def explain(messages: Sequence[Message], *, policy: str | None = None) -> HttpCall[dict[str, Any]]:
    """Explain how a conversation is linked, without answering it; the fields are those of the HTTP
    API."""
    return HttpCall("POST", EXPLAIN, _read_json, _chat_body(messages, policy, {}))


def expire_cache(cache: HasId | str) -> HttpCall[None]:
    """Delete a context cache."""
    return HttpCall("DELETE", _cache_path(cache), _read_deleted, named={"id": _id_of(cache)})


def _read_deleted(response: httpx.Response) -> None:
    if not response.json()["deleted"]:
        raise ValueError("it has deleted nothing")


def expire_caches(metadata: Mapping[str, str], *, scope: str = "private") -> HttpCall[int]:
    """Delete all context caches that have all these pairs of metadata; return how many."""
    query = _metadata_query(metadata) | {"scope": scope}
    return HttpCall("DELETE", CACHES, lambda response: int(response.json()["deleted"]), query=query)


def update_cache(cache: HasId | str, **changes: Any) -> HttpCall[RemoteContextCache]:
    """Change ``ttl``, ``expires_at``, ``name``, ``metadata`` or ``pinned``; None removes."""
    return HttpCall(
        "PATCH", _cache_path(cache), read_context_cache, changes, named={"id": _id_of(cache)}
    )


def list_caches(
    *,
    limit: int = 20,
    after: HasId | str | None = None,
    order: str = "desc",
    metadata: Mapping[str, str] | None = None,
    scope: str = "private",
) -> HttpCall[RemotePage]:
    """List at most ``limit`` context caches by time of creation, those after ``after``.

    Only those with all pairs of ``metadata``; ``scope``: one's own ("private"), or the shared ones
    ("shared").
    """
    query = {"limit": str(limit), "order": order, "scope": scope, **_metadata_query(metadata or {})}
    if after is not None:
        query["after"] = _id_of(after)
    return HttpCall("GET", CACHES, read_page, query=query)


def caches_usage(*, scope: str = "private") -> HttpCall[dict[str, Any]]:
    """Return the number of context caches, the size of their KV, and the quota, in the fields of
    the HTTP API."""
    return HttpCall("GET", f"{CACHES}/usage", _read_json, query={"scope": scope})


def _chat_body(
    messages: Sequence[Message], policy: str | None, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a chat request. ``sampling`` are the server's fields, which it checks
    itself. Raises InvalidRequestError for an ``n`` of more choices than an answer has."""
    several = sampling.get("n")
    if isinstance(several, int) and several > 1:
        raise InvalidRequestError(
            f"n is {several}, but an answer here is one choice: leave it out, and call as often.",
            param="n",
        )
    body: dict[str, Any] = {"messages": [_plain(message) for message in messages], **sampling}
    if policy is not None:
        body["link"] = _linked_under(policy, sampling.get("link"))
    return body


def _linked_under(policy: str, link: Any) -> dict[str, Any]:
    """Return the field ``link`` with the policy. Raises InvalidRequestError if it has another."""
    if link is not None and (not isinstance(link, Mapping) or link.get("policy", policy) != policy):
        raise InvalidRequestError(
            f"'policy' is {policy!r}, but 'link' is {link!r}. Give the policy in one of them.",
            param="link.policy",
        )
    return {**(link or {}), "policy": policy}


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"A message is {message!r}, but must be a mapping with a 'role' and a 'content'.",
            param="messages",
        )
    content = _listed(message.get("content"))
    parts = [_part(part) for part in content] if isinstance(content, list) else content
    return {**message, "content": parts}


def _listed(value: Any) -> Any:
    """Return a list of several values as JSON has it; anything else as it is, for the server says
    what is wrong with it."""
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return list(value) if several else value


def _part(part: str | HasId | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return part if isinstance(part, Mapping) else {"type": "context_cache", "id": _id_of(part)}


def _id_of(cache: HasId | str) -> str:
    cache_id = cache if isinstance(cache, str) else getattr(cache, "id", None)
    if not isinstance(cache_id, str):
        raise InvalidRequestError(
            f"{cache!r} is no context cache, and no id of one.", param="cache"
        )
    return cache_id


def _cache_path(cache: HasId | str) -> str:
    """Return the path of a context cache. Raises ContextCacheNotFoundError for an id that no server
    gives, and that might name another path."""
    cache_id = _id_of(cache)
    if not re.fullmatch(r"[\w-]+", cache_id, re.ASCII):
        raise ContextCacheNotFoundError(cache_id)
    return f"{CACHES}/{cache_id}"


def _metadata_query(metadata: Mapping[str, str]) -> dict[str, str]:
    return {f"metadata[{key}]": value for key, value in metadata.items()}


def _read_json(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    return body


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"The request cannot be sent as JSON: {error}") from error
