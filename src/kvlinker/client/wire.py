"""What travels between client and server: bodies to send, and answers and errors to read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import httpx

from kvlinker.errors import (
    AuthenticationError,
    ContextCacheNotFoundError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    PinLimitError,
    PolicyError,
    QuotaExceededError,
)
from kvlinker.types.answers import Timing, Usage

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
CACHES = "v1/context_caches"
CHAT = "v1/chat/completions"
EXPLAIN = "v1/link/explain"

JSON = {"Content-Type": "application/json"}

_ERRORS: dict[str, type[KVLinkerError]] = {
    error.code: error
    for error in (
        AuthenticationError,
        ContextLengthError,
        EngineClosedError,
        ModelNotFoundError,
        PermissionDeniedError,
        PinLimitError,
        PolicyError,
        QuotaExceededError,
    )
}


class ServerUnreachableError(KVLinkerError):
    """No server answers at the address, or it broke off."""

    status = 503
    code = "server_unreachable"


@dataclass(frozen=True, slots=True)
class RemoteContextCache:
    """A context cache of the server's; stands in message content. Times are Unix seconds."""

    id: str
    model: str
    name: str | None
    tokens: int
    bytes: int
    tier: str | None
    created_at: int
    expires_at: int | None
    metadata: Mapping[str, str]
    pinned: bool
    scope: str


class RemotePage(NamedTuple):
    """One page of a listing; ``has_more``: further context caches follow the last item."""

    items: tuple[RemoteContextCache, ...]
    has_more: bool


class HasId(Protocol):
    """A context cache, from the client or from ``LLM``."""

    @property
    def id(self) -> str: ...


Message = Mapping[str, Any]
"""``role`` and ``content``, which is text or a list of texts, context caches and the API's own parts."""


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """What a request came to."""

    text: str
    finish_reason: str
    usage: Usage
    timing: Timing


def server_root(base_url: str) -> str:
    """The address without the ``/v1`` that OpenAI's clients want at its end."""
    return base_url.rstrip("/").removesuffix("/v1")


def headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def chat_body(messages: Sequence[Message], policy: str | None, sampling: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [_plain(message) for message in messages], **sampling}
    return body if policy is None else body | {"link": {"policy": policy}}


def _plain(message: Message) -> dict[str, Any]:
    content = message["content"]
    parts = content if isinstance(content, str) else [_part(part) for part in content]
    return {**message, "content": parts}


def _part(part: str | HasId | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return part if isinstance(part, Mapping) else {"type": "context_cache", "id": part.id}


def cache_path(cache: HasId | str) -> str:
    return f"{CACHES}/{quote(cache if isinstance(cache, str) else cache.id, safe='')}"


def metadata_query(metadata: Mapping[str, str] | None) -> dict[str, str]:
    return {f"metadata[{key}]": value for key, value in (metadata or {}).items()}


def page_query(
    limit: int, after: HasId | str | None, order: str, metadata: Mapping[str, str] | None, scope: str
) -> dict[str, str]:
    query = {"limit": str(limit), "order": order, "scope": scope, **metadata_query(metadata)}
    if after is not None:
        query["after"] = after if isinstance(after, str) else after.id
    return query


def read_cache(entry: Mapping[str, Any]) -> RemoteContextCache:
    return RemoteContextCache(**{name: entry[name] for name in RemoteContextCache.__slots__})


def read_caches(response: httpx.Response) -> tuple[RemoteContextCache, ...]:
    return tuple(map(read_cache, response.json()["data"]))


def read_page(response: httpx.Response) -> RemotePage:
    return RemotePage(read_caches(response), response.json()["has_more"])


def read_answer(response: httpx.Response) -> RemoteAnswer:
    body = response.json()
    choice = body["choices"][0]
    usage = body["usage"]
    details = usage["prompt_tokens_details"]
    known = details["cached_tokens"] + details["recomputed_tokens"]
    phases = re.findall(r"(queue|load|link|decode);dur=([0-9.]+)", response.headers.get("server-timing", ""))
    return RemoteAnswer(
        text=choice["message"]["content"],
        finish_reason=choice["finish_reason"],
        usage=Usage(**details, fresh_tokens=usage["prompt_tokens"] - known, output_tokens=usage["completion_tokens"]),
        timing=Timing(**{phase: float(milliseconds) / 1000 for phase, milliseconds in phases}),
    )


def read_texts(line: str) -> Iterator[str]:
    """The text in one line of an event stream, if there is any. Raises the error that it tells of."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise _error_of(chunk["error"], status=500)
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            yield text


def encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise InvalidRequestError(f"The request cannot be sent as JSON: {error}") from error


@contextmanager
def transport_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ServerUnreachableError(f"The server cannot be reached: {error}. Check the address.") from error


def checked(response: httpx.Response, body: Mapping[str, Any]) -> httpx.Response:
    if response.is_error:
        raise error_of(response, body)
    return response


def error_of(response: httpx.Response, body: Mapping[str, Any]) -> KVLinkerError:
    """The error that an answer tells of; ``body`` is what was sent."""
    try:
        error = response.json()["error"]
        told = {name: error[name] for name in ("message", "code", "param")}
    except (ValueError, KeyError, TypeError):
        told = {"message": f"{response.url} answered {response.status_code}.", "code": None, "param": None}
    if told["code"] == OverloadedError.code:
        return OverloadedError(told["message"], retry_after=int(response.headers.get("retry-after", 1)))
    if told["code"] == ContextCacheNotFoundError.code:
        return ContextCacheNotFoundError(_at(body, told["param"]))
    return _error_of(told, status=response.status_code)


def _error_of(told: Mapping[str, Any], *, status: int) -> KVLinkerError:
    fallback = InvalidRequestError if 400 <= status < 500 else KVLinkerError
    error = _ERRORS.get(told["code"], fallback)(told["message"], param=told["param"], code=told["code"])
    error.status = status
    return error


def _at(body: Any, path: str) -> str:
    """What stands at a parameter's path, such as ``messages.0.content.1.id``."""
    for step in path.split("."):
        body = body[int(step) if isinstance(body, list) else step]
    return str(body)
