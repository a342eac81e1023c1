"""The values that client and server exchange: context caches, answers, and a server's errors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import httpx

from kvlinker.base.errors import (
    AuthenticationError,
    ContextCacheNotFoundError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    ModelLoadingError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    PinLimitError,
    PolicyError,
    QuotaExceededError,
    UnknownArgumentError,
)
from kvlinker.base.types.answers import Timing, Usage
from kvlinker.base.types.texts import CacheContent, Piece, SearchHit
from kvlinker.base.types.tools import ToolCall

logger = logging.getLogger(__name__)

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
        UnknownArgumentError,
    )
}


class ServerUnreachableError(KVLinkerError):
    """No server answers at the address, or it broke off."""

    status = 503
    code = "server_unreachable"


@dataclass(frozen=True, slots=True)
class RemoteContextCache:
    """Describes a context cache of the server's, which stands in message content. Times are Unix
    seconds."""

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

    usable: bool
    """False if it was made with another model, or other weights, than the server has now."""

    implicit: bool
    """True if a prompt's text was cached on the way; it lives on with every use."""


class RemotePage(NamedTuple):
    """Holds one page of a listing; ``has_more`` is true if more context caches follow the last
    item."""

    items: tuple[RemoteContextCache, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """Holds the answer to a conversation: its text, why it ended, what the prompt reused, and where
    the time went."""

    text: str
    finish_reason: str
    usage: Usage
    timing: Timing

    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of tools that the model asks for; the text may be empty then."""

    reasoning: str = ""
    """The model's reasoning before its answer, if it shows any."""


Told = TypeVar("Told", RemoteContextCache, SearchHit)


def read_context_cache(response: httpx.Response) -> RemoteContextCache:
    return _known(RemoteContextCache, response.json())


def read_caches(response: httpx.Response) -> tuple[RemoteContextCache, ...]:
    return tuple(_known(RemoteContextCache, entry) for entry in response.json()["data"])


def read_page(response: httpx.Response) -> RemotePage:
    return RemotePage(read_caches(response), response.json()["has_more"])


def read_pieces(response: httpx.Response, text: str) -> tuple[Piece, ...]:
    return tuple(
        Piece(text[entry["start"] : entry["end"]], entry["tokens"], entry["start"])
        for entry in response.json()["data"]
    )


def read_hits(response: httpx.Response) -> tuple[SearchHit, ...]:
    return tuple(_known(SearchHit, entry) for entry in response.json()["data"])


def read_content(response: httpx.Response) -> CacheContent:
    body = response.json()
    return CacheContent(body["id"], body["text"], tuple(body["token_ids"]), body["metadata"])


def _known(kind: type[Told], entry: Mapping[str, Any]) -> Told:
    """Make a value of the fields that this client knows; a newer server may send more."""
    return kind(**{name: entry[name] for name in kind.__slots__})


def read_answer(response: httpx.Response) -> RemoteAnswer:
    if ignored := response.headers.get("x-ignored-fields"):
        logger.warning("The server does not know %s, and answered without.", ignored)
    body = response.json()
    choice = body["choices"][0]
    usage = body["usage"]
    details = usage["prompt_tokens_details"]
    cached, recomputed = details["cached_tokens"], details["recomputed_tokens"]
    phases = re.findall(
        r"(queue|load|link|decode);dur=([0-9.]+)", response.headers.get("server-timing", "")
    )
    return RemoteAnswer(
        text=choice["message"]["content"] or "",  # null where there are calls of tools alone
        finish_reason=choice["finish_reason"],
        usage=Usage(
            cached_tokens=cached,
            recomputed_tokens=recomputed,
            fresh_tokens=usage["prompt_tokens"] - cached - recomputed,
            output_tokens=usage["completion_tokens"],
            exact_cached_tokens=details["exact_cached_tokens"],
        ),
        timing=Timing(**{phase: float(milliseconds) / 1000 for phase, milliseconds in phases}),
        tool_calls=tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"].get("tool_calls") or ()
        ),
        reasoning=choice["message"].get("reasoning_content") or "",
    )


def read_texts(data: str) -> Iterator[str]:
    """Yield the text in the data of one event of a stream, if there is any. Raises the error of an
    error event."""
    if data == "[DONE]":
        return
    chunk = json.loads(data)
    if "error" in chunk:
        raise _error_of(chunk["error"], status=500)
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            yield text


@contextmanager
def transport_errors(address: httpx.URL) -> Iterator[None]:
    """Raise httpx's errors of the connection to the server at ``address`` as
    ServerUnreachableError."""
    try:
        yield
    except httpx.ReadTimeout as error:
        raise ServerUnreachableError(
            f"The server at {str(address).rstrip('/')} has not answered in time, and may still"
            " compute. Ask for less at once, or give the client a longer timeout."
        ) from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ServerUnreachableError(
            f"No server answers at {str(address).rstrip('/')}: {error}. Check the address."
        ) from error


@contextmanager
def answers_of_others() -> Iterator[None]:
    """Raise the errors of reading an answer that has another form as ServerUnreachableError: a
    proxy's page, a redirection, or the answer of another kind of server."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerUnreachableError(
            f"What answers is no server of kvlinker's: {error}. Check the address."
        ) from error


def access_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of calls with this key. Raises InvalidRequestError, which does not show
    it, for one that headers cannot have."""
    if api_key is None:
        return {}
    if not isinstance(api_key, str) or not re.fullmatch("[!-~]+", api_key):
        raise InvalidRequestError(
            "The API key must be letters, digits and signs of ASCII, without spaces and line"
            " breaks, but has others, or none at all. Copy it again, on one line.",
            param="api_key",
        )
    return {"Authorization": f"Bearer {api_key}"}


def error_of(response: httpx.Response, body: Mapping[str, Any]) -> KVLinkerError:
    """Make the error of an answer; ``body`` is the request's."""
    try:
        error = response.json()["error"]
        details = {name: error[name] for name in ("message", "code", "param")}
    except (ValueError, KeyError, TypeError):
        details = {
            "message": f"{response.url} answered {response.status_code}.",
            "code": None,
            "param": None,
        }
    for later in (OverloadedError, ModelLoadingError):
        if details["code"] == later.code:
            pause = int(response.headers.get("retry-after", 1))
            return later(details["message"], retry_after=pause)
    if details["code"] == ContextCacheNotFoundError.code:
        return ContextCacheNotFoundError(_at(body, details["param"]))
    return _error_of(details, status=response.status_code)


def _error_of(details: Mapping[str, Any], *, status: int) -> KVLinkerError:
    fallback = InvalidRequestError if 400 <= status < 500 else KVLinkerError
    kind = _ERRORS.get(details["code"], fallback)
    error = kind(details["message"], param=details["param"], code=details["code"])
    error.status = status
    return error


def _at(body: Any, path: str) -> str:
    """Return the value at a parameter's path, such as ``messages.0.content.1.id``."""
    for step in path.split("."):
        body = body[int(step) if isinstance(body, list) else step]
    return str(body)
