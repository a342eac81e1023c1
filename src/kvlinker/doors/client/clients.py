"""The two clients: the same calls, sent by httpx in the calling thread or on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload

import httpx
from httpx_sse import EventSource

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.client import calls
from kvlinker.doors.client.calls import HttpCall, Message
from kvlinker.doors.client.wire import RemoteAnswer, access_headers, read_texts, transport_errors

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


def _with_self(method: Callable[P, T]) -> Callable[P, T]:
    """Give ``method`` the signature of the call that it wraps, with ``self`` and its result."""
    shown = signature(method)
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *shown.parameters.values()]
    returned = str(shown.return_annotation).removeprefix("HttpCall[").removesuffix("]")
    method.__signature__ = shown.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return method


def _sent(describe: Callable[P, HttpCall[T]]) -> Callable[Concatenate[Client, P], T]:
    """Make the method of ``Client`` that sends the call which ``describe`` describes."""

    @wraps(describe)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = describe(*args, **kwargs)
        with transport_errors(client._http.base_url):
            response = client._http.request(**call.request())
        return call.result(response)

    return _with_self(method)


def _sent_async(
    describe: Callable[P, HttpCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make the method of ``AsyncClient`` that sends the call which ``describe`` describes."""

    @wraps(describe)
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = describe(*args, **kwargs)
        with transport_errors(client._http.base_url):
            response = await client._http.request(**call.request())
        return call.result(response)

    return _with_self(method)


class Client:
    """Calls a kvlinker server. Errors are raised as the KVLinkerErrors that ``LLM`` raises."""

    def __init__(
        self, base_url: str, api_key: str | None = None, *, timeout: httpx.Timeout = TIMEOUT
    ) -> None:
        self._http = httpx.Client(
            base_url=_root(base_url), headers=access_headers(api_key), timeout=timeout
        )

    generate_context_cache = _sent(calls.generate_context_cache)
    cache_text = _sent(calls.cache_text)
    split_text = _sent(calls.split_text)
    search = _sent(calls.search)
    read_cache = _sent(calls.read_cache)
    explain = _sent(calls.explain)
    expire_cache = _sent(calls.expire_cache)
    expire_caches = _sent(calls.expire_caches)
    update_cache = _sent(calls.update_cache)
    list_caches = _sent(calls.list_caches)
    caches_usage = _sent(calls.caches_usage)
    server_status = _sent(calls.server_status)
    server_metrics = _sent(calls.server_metrics)
    _chat_completion = _sent(calls.chat_completion)

    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        stream: Literal[False] = False,
        **sampling: Any,
    ) -> RemoteAnswer: ...

    @overload
    def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        stream: Literal[True],
        **sampling: Any,
    ) -> Iterator[str]: ...

    def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        stream: bool = False,
        **sampling: Any,
    ) -> RemoteAnswer | Iterator[str]:
        """Answer a conversation; with ``stream``, as ``stream_chat_completion`` does.

        ``sampling`` are fields of the HTTP API, such as ``max_tokens``.
        """
        if stream:
            return self.stream_chat_completion(messages, policy=policy, **sampling)
        return self._chat_completion(messages, policy=policy, **sampling)

    def stream_chat_completion(
        self, messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Yield the answer's text as it is generated; closing the iterator cancels the request."""
        call = calls.stream_chat_completion(messages, policy, sampling)
        with transport_errors(self._http.base_url), self._http.stream(**call.request()) as response:
            if response.is_error:
                response.read()
            call.result(response)
            for event in EventSource(response).iter_sse():
                yield from read_texts(event.data)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Calls a kvlinker server from asyncio: its methods are those of ``Client``, to be awaited."""

    def __init__(
        self, base_url: str, api_key: str | None = None, *, timeout: httpx.Timeout = TIMEOUT
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=_root(base_url), headers=access_headers(api_key), timeout=timeout
        )

    generate_context_cache = _sent_async(calls.generate_context_cache)
    cache_text = _sent_async(calls.cache_text)
    split_text = _sent_async(calls.split_text)
    search = _sent_async(calls.search)
    read_cache = _sent_async(calls.read_cache)
    explain = _sent_async(calls.explain)
    expire_cache = _sent_async(calls.expire_cache)
    expire_caches = _sent_async(calls.expire_caches)
    update_cache = _sent_async(calls.update_cache)
    list_caches = _sent_async(calls.list_caches)
    caches_usage = _sent_async(calls.caches_usage)
    server_status = _sent_async(calls.server_status)
    server_metrics = _sent_async(calls.server_metrics)
    _chat_completion = _sent_async(calls.chat_completion)

    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        stream: Literal[False] = False,
        **sampling: Any,
    ) -> RemoteAnswer: ...

    @overload
    async def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        stream: Literal[True],
        **sampling: Any,
    ) -> AsyncIterator[str]: ...

    async def chat_completion(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        stream: bool = False,
        **sampling: Any,
    ) -> RemoteAnswer | AsyncIterator[str]:
        """Answer a conversation; with ``stream``, as ``stream_chat_completion`` does.

        ``sampling`` are fields of the HTTP API, such as ``max_tokens``.
        """
        if stream:
            return self.stream_chat_completion(messages, policy=policy, **sampling)
        return await self._chat_completion(messages, policy=policy, **sampling)

    async def stream_chat_completion(
        self, messages: Sequence[Message], *, policy: str | None = None, **sampling: Any
    ) -> AsyncIterator[str]:
        """Yield the answer's text as it is generated; closing the iterator cancels the request."""
        call = calls.stream_chat_completion(messages, policy, sampling)
        with transport_errors(self._http.base_url):
            async with self._http.stream(**call.request()) as response:
                if response.is_error:
                    await response.aread()
                call.result(response)
                async for event in EventSource(response).aiter_sse():
                    for text in read_texts(event.data):
                        yield text

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _root(base_url: str) -> str:
    """Return the address without the ``/v1`` that OpenAI's clients want at its end. Raises
    InvalidRequestError for an invalid address."""
    try:
        url = httpx.URL(base_url)
        cause = (
            ""
            if url.scheme in ("http", "https") and url.host
            else "it needs http:// or https:// and a host"
        )
    except (httpx.InvalidURL, TypeError) as error:
        cause = str(error).rstrip(".")
    if cause:
        raise InvalidRequestError(
            f"{base_url!r} is no address of a server: {cause}. Write one such as"
            " 'http://localhost:8000'.",
            param="base_url",
        )
    return base_url.rstrip("/").removesuffix("/v1")
