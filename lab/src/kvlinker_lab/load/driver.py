"""Sends conversations to an OpenAI-compatible server, open- or closed-loop, and times the streams
of its answers.

In the open loop, requests are sent when they are due, however many are unanswered, and every time
counts from when a request was due: a server that falls behind cannot slow its own traffic down.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse

from kvlinker_lab.load.endpoint import CHAT, Endpoint, error_message
from kvlinker_lab.load.prompts import DocumentForm, write_request
from kvlinker_lab.load.traffic import Conversation, poisson_arrivals

UNFINISHED = "unfinished"
"""The kind of failure of a request that took longer than the patience."""
NOT_SENT = "not sent"
"""The kind of failure of a turn after one that failed."""
NO_TEXT = "no text"
"""The kind of failure of a complete answer whose first token cannot be timed, since it has no
text."""
BROKEN_OFF, UNREADABLE, CONNECTION, ERROR = "broken off", "unreadable", "connection", "error"
"""Kinds of failures of streams and connections; an HTTP error is "status N"."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Lets requests come as a Poisson process, whether others are answered or not."""

    rate: float
    """Requests a second, on average."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Lets a fixed number of users ask, each of them again as soon as it has its answer."""

    users: int


Load = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """The server's count of a prompt's tokens."""

    prompt_tokens: int
    cached_tokens: int | None
    """Tokens whose KV was there and kept; None if the server does not report it."""
    recomputed_tokens: int | None
    """Tokens of chunks that were computed again; None if the server does not report it."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The outcome of one request. Times are in seconds since it was due."""

    first_token: float | None
    """When the first text came; None if none came."""
    last_token: float | None
    """When the last text came; None if none came."""
    ended: float
    """When the answer was complete, or the failure was known."""
    output_tokens: int = 0
    usage: PromptUsage | None = None
    text: str = ""
    failure: str | None = None
    """The kind of failure; None for a complete answer."""
    detail: str = ""
    """The server's message about the failure."""

    @property
    def seconds_per_token(self) -> float | None:
        """The mean time between two tokens; None for fewer than two tokens."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Holds the results of all requests of a run, in the order in which they ended."""

    results: tuple[RequestResult, ...]
    seconds: float
    """From the beginning to the end of the last request."""


def drive(
    endpoint: Endpoint,
    conversations: Sequence[Conversation],
    load: Load,
    form: DocumentForm,
    *,
    patience: float,
    seed: int = 0,
    on_result: Callable[[int], None] = lambda _: None,
) -> LoadRun:
    """Send all conversations, and wait until every request has been answered or has failed.

    A request that takes longer than ``patience``, in seconds since it was due, is cancelled and
    counts as unfinished; the turns after a failed one count as not sent. ``seed`` is that of the
    arrivals. ``on_result`` is called with the number of requests that have ended.
    """

    async def run() -> LoadRun:
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=endpoint.url, headers=endpoint.headers, timeout=None, limits=unlimited
        ) as http:
            driver = Driver(http, endpoint.model, form, patience, on_result)
            clock = asyncio.get_running_loop()
            begin = clock.time()
            if isinstance(load, OpenLoop):
                requests = sum(len(conversation.turns) for conversation in conversations)
                rate = load.rate * len(conversations) / max(requests, 1)
                arrivals = poisson_arrivals(rate, len(conversations), seed=seed)
                await driver.open_loop(conversations, arrivals)
            else:
                await driver.closed_loop(conversations, load.users)
            return LoadRun(tuple(driver.results), clock.time() - begin)

    return asyncio.run(run())


class Driver:
    """Sends conversations on one event loop, and collects the results of their requests."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        form: DocumentForm,
        patience: float,
        on_result: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``patience`` and ``on_result`` are those of ``drive``."""
        self._http = http
        self._model = model
        self._form = form
        self._patience = patience
        self._on_result = on_result
        self._clock = asyncio.get_running_loop()
        self.results: list[RequestResult] = []

    async def open_loop(
        self, conversations: Sequence[Conversation], arrivals: Sequence[float]
    ) -> None:
        begin = self._clock.time()
        async with asyncio.TaskGroup() as tasks:
            for conversation, arrival in zip(conversations, arrivals, strict=True):
                await asyncio.sleep(begin + arrival - self._clock.time())
                tasks.create_task(self.converse(conversation, due=begin + arrival))

    async def closed_loop(self, conversations: Sequence[Conversation], users: int) -> None:
        waiting = iter(conversations)

        async def user() -> None:
            for conversation in waiting:
                await self.converse(conversation, due=self._clock.time())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(users):
                tasks.create_task(user())

    async def converse(self, conversation: Conversation, *, due: float) -> None:
        """Send the turns of a conversation one after another; ``due`` is the first one's time on
        the loop's clock."""
        answers: list[str] = []
        for number, turn in enumerate(conversation.turns):
            if number:
                due = self._clock.time() + turn.think_seconds
                await asyncio.sleep(turn.think_seconds)
            result = await self._ask(
                write_request(conversation, answers, self._form, model=self._model), due
            )
            self._add(result)
            if result.failure is not None:
                for _ in conversation.turns[number + 1 :]:
                    self._add(
                        RequestResult(None, None, 0.0, failure=NOT_SENT, detail=result.detail)
                    )
                return
            answers.append(result.text)

    def _add(self, result: RequestResult) -> None:
        self.results.append(result)
        self._on_result(len(self.results))

    async def _ask(self, body: Mapping[str, Any], due: float) -> RequestResult:
        """Send a request and read its stream to the end."""
        stream = _Stream(self._clock.time, due)
        try:
            async with (
                asyncio.timeout_at(due + self._patience),
                aconnect_sse(self._http, "POST", CHAT, json=body) as source,
            ):
                if source.response.is_error:
                    await source.response.aread()
                    return stream.result(
                        f"status {source.response.status_code}", error_message(source.response)
                    )
                async for event in source.aiter_sse():
                    if event.data == "[DONE]":
                        break
                    stream.read(json.loads(event.data))
        except TimeoutError:
            return stream.result(UNFINISHED, f"no complete answer within {self._patience:g} s")
        except SSEError as error:  # which is one of httpx's transport errors
            return stream.result(UNREADABLE, str(error))
        except httpx.TransportError as error:
            return stream.result(CONNECTION, str(error) or type(error).__name__)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return stream.result(UNREADABLE, f"{type(error).__name__}: {error}")
        return stream.result()


class _Stream:
    """Reads the chunks of one streamed chat completion, and notes when text comes."""

    def __init__(self, now: Callable[[], float], due: float) -> None:
        self._now = now
        self._due = due
        self._times: list[float] = []
        self._texts: list[str] = []
        self._usage: PromptUsage | None = None
        self._timed_usage: PromptUsage | None = None
        self._output_tokens: int | None = None
        self._error: str | None = None
        self._complete = False

    def read(self, chunk: Mapping[str, Any]) -> None:
        if "error" in chunk:
            error = chunk["error"]
            self._error = str(error.get("message", error) if isinstance(error, Mapping) else error)
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            text = delta.get("content")
            if text or delta.get("reasoning_content"):
                self._times.append(self._now() - self._due)
            self._texts.append(text or "")
            self._complete |= choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            self._usage = _prompt_usage(usage)
            self._output_tokens = int(usage["completion_tokens"])
        if timings := chunk.get("timings"):
            self._timed_usage = _timed_usage(timings)

    @property
    def _reported_usage(self) -> PromptUsage | None:
        """Return the counts of ``usage``, or those of ``timings`` if ``usage`` has none of cached
        tokens."""
        if self._timed_usage is not None and (
            self._usage is None or self._usage.cached_tokens is None
        ):
            return self._timed_usage
        return self._usage

    def result(self, failure: str | None = None, detail: str = "") -> RequestResult:
        """Return the result so far. An answer that is not complete, or has no text, is a failure,
        too."""
        if failure is None:
            if self._error is not None:
                failure, detail = ERROR, self._error
            elif not self._complete:
                failure, detail = BROKEN_OFF, "the stream ended before the answer did"
            elif not self._times:
                failure, detail = (
                    NO_TEXT,
                    "the answer had no text, so that its first token cannot be timed",
                )
        return RequestResult(
            first_token=self._times[0] if self._times else None,
            last_token=self._times[-1] if self._times else None,
            ended=self._now() - self._due,
            output_tokens=len(self._times) if self._output_tokens is None else self._output_tokens,
            usage=self._reported_usage,
            text="".join(self._texts),
            failure=failure,
            detail=detail,
        )


def _prompt_usage(usage: Mapping[str, Any]) -> PromptUsage:
    details = usage.get("prompt_tokens_details") or {}
    return PromptUsage(
        int(usage["prompt_tokens"]), details.get("cached_tokens"), details.get("recomputed_tokens")
    )


def _timed_usage(timings: Mapping[str, Any]) -> PromptUsage | None:
    """Read the counts in the timings of llama.cpp's server: the prompt's tokens that were cached,
    and that were not."""
    if not {"cache_n", "prompt_n"} <= timings.keys():
        return None
    cached = int(timings["cache_n"])
    return PromptUsage(cached + int(timings["prompt_n"]), cached, None)
