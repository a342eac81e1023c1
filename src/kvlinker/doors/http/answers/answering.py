"""Answers of all routes that generate: from prompts to a response, whole or as server-sent events.

``Choices`` are a request's while they are generated: events pass from the engine's thread to the
event loop.
An ``AnswerFormat`` has an API's words: ``CompletionAnswer`` those of completions, ``DialectAnswer``
(``kvlinker.doors.http.answers.dialects``) those of other APIs.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import Delta, Timing, Usage
from kvlinker.doors.http.answers.link_bodies import ended_link, link_body
from kvlinker.doors.http.edge.access_log import is_noted, note_link, note_tokens
from kvlinker.doors.http.edge.errors import (
    IGNORED_HEADER,
    blame,
    error_body,
    error_responses,
    failure_of,
)
from kvlinker.doors.http.edge.guards import caller_of, wait_for_disconnect
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.fields.generation import SamplingBody, StreamOptions
from kvlinker.doors.http.fields.server_status import RecentRequest
from kvlinker.doors.http.models import RequestTrace, ServedModel, served_by
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, RequestHandle
from kvlinker.engines.contract.output import inbox_of
from kvlinker.llm import LLM, Answer, ChoiceSink, Prompt, ReadPrompt
from kvlinker.service.reading.reader import PreparedRequest

END_SECONDS = 60.0
"""The time that a step may take before the log is written of an answer whose client has left."""


class PromptTokensDetails(ResponseBody):
    """The prompt's tokens by the source of their KV: ``cached_tokens`` were reused as they were,
    and ``recomputed_tokens`` are tokens of chunks that were computed again. All others are fresh.
    ``exact_cached_tokens`` are the cached tokens that an earlier request computed in the same
    sequence. ``reusable_tokens`` are the fresh tokens that ``implicit = "auto"`` would have found
    in earlier prompts."""

    cached_tokens: int
    exact_cached_tokens: int
    recomputed_tokens: int
    reusable_tokens: int = 0


class UsageBody(ResponseBody):
    """The tokens of a request: each prompt counts once, and all choices count. Figures that are
    sent while an answer is generated cover one choice so far, and have no details yet."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ChoiceOutput(NamedTuple):
    """The whole output of one choice."""

    deltas: list[Delta]
    finished: Finished


class Choices:
    """Merges ``n`` choices for each prompt, numbered prompt by prompt, into one series of events.

    ``len(choices)`` counts them over all prompts.
    """

    def __init__(
        self,
        llm: LLM,
        asked: PreparedRequest,
        *,
        n: int,
        loop: asyncio.AbstractEventLoop,
        trace: RequestTrace | None = None,
    ) -> None:
        """Queue all choices, or none; events go to ``loop``, and ends to ``trace``. ``max_tokens``
        is cut to what fits behind each prompt. Raises the errors of ``LLM.submit_prepared``.

        Planning takes a while for long prompts: call it in a thread.
        """
        self.n = n
        self.prompts = asked.prompts
        self.tenant = asked.tenant
        self.began = time.monotonic()
        self.output_tokens = 0
        """Counted over all choices so far."""
        self._count = len(asked.prompts) * n
        self._inbox = inbox_of(loop)
        self._events: asyncio.Queue[tuple[int, GenerationEvent]] = asyncio.Queue()
        self._handles: list[RequestHandle] = []
        self._ends: dict[int, Finished | Failed] = {}
        self._all_ended = asyncio.Event()
        for number, (field, prompt) in enumerate(asked.prompts.items()):
            sink = self._sink(number * n, prompt, trace)
            fitting = asked._replace(sampling=llm.fitting(asked.sampling, prompt.prompt))
            try:
                handle = llm.submit_prepared(fitting, sink, number=number, n=n)
            except BaseException as error:
                self.cancel()
                blame(error, field)
                raise
            self._handles.append(handle)

    def __len__(self) -> int:
        return self._count

    @property
    def ended(self) -> bool:
        """True once all choices have ended."""
        return self._all_ended.is_set()

    def cancel(self) -> None:
        """Free the slots of choices that are not finished. Idempotent."""
        for handle in self._handles:
            handle.cancel()

    def fail(self, error: KVLinkerError) -> None:
        """End ``events`` with an error. Called in the event loop."""
        self._events.put_nowait((0, Failed(error)))
        self.cancel()

    async def ends(self) -> list[Finished]:
        """Wait until all choices have ended, also those that nobody reads any more, and return
        their ends; none if any failed."""
        await self._all_ended.wait()
        ends = [self._ends[index] for index in range(self._count)]
        finished = [end for end in ends if isinstance(end, Finished)]
        return finished if len(finished) == len(ends) else []

    async def events(self) -> AsyncIterator[tuple[int, Delta | Finished]]:
        """Yield the choice's number and its next event, until all are finished. Raises the error of
        one that failed."""
        missing = self._count
        try:
            while missing:
                index, event = await self._events.get()
                if isinstance(event, Failed):
                    raise event.error
                missing -= isinstance(event, Finished)
                yield index, event
        except BaseException:
            self.cancel()
            raise

    async def outputs(self) -> list[ChoiceOutput]:
        """Return all choices, once they are finished. Raises the error of one that failed."""
        deltas: list[list[Delta]] = [[] for _ in range(self._count)]
        finished: dict[int, Finished] = {}
        async for index, event in self.events():
            if isinstance(event, Finished):
                finished[index] = event
            else:
                deltas[index].append(event)
        return [ChoiceOutput(deltas[index], finished[index]) for index in range(self._count)]

    @asynccontextmanager
    async def cancelled_on_disconnect(self, receive: Receive) -> AsyncIterator[None]:
        """Cancel as soon as the client is gone; the request's body must have been read."""

        async def watch() -> None:
            await wait_for_disconnect(receive)
            self.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()

    def _sink(self, first: int, prompt: ReadPrompt, trace: RequestTrace | None) -> ChoiceSink:
        """Return a sink for the events of one prompt's choices, the first of which has the number
        ``first``."""

        def take(index: int, event: GenerationEvent) -> None:
            self._events.put_nowait((first + index, event))
            if isinstance(event, Delta):
                self.output_tokens += len(event.token_ids)
                return
            self._ends[first + index] = event
            if len(self._ends) == self._count:
                self._all_ended.set()
            if trace is not None:
                trace.ended(index, prompt, event)

        def sink(index: int, event: GenerationEvent) -> None:
            self._inbox.put(take, index, event)

        return sink


class AnswerFormat(Protocol):
    """The answer to one request in the words of its API."""

    def events(
        self, choices: Choices, scope: Scope
    ) -> AsyncIterator[str] | AsyncIterator[dict[str, str]]:
        """Yield the events of a stream: texts, or names (``event``) with texts (``data``). One
        that fails half way ends with an event that says so; ``scope`` is the request's."""
        ...

    def whole(self, choices: Choices, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        """Return the body of the whole answer. It takes long for long answers: call it in a
        thread."""
        ...


def completion_responses(chunk: str, *, ignores: bool = False) -> dict[int | str, dict[str, Any]]:
    """Describe the answers of a completion route; ``chunk`` names the schema of a stream's events.
    ``ignores``: they may name fields without effect."""
    events = {"schema": {"$ref": f"#/components/schemas/{chunk}"}}
    timing = {
        "description": "Milliseconds: queue, load, link, decode.",
        "schema": {"type": "string"},
    }
    headers: dict[str, Any] = {"Server-Timing": timing}
    if ignores:
        headers[IGNORED_HEADER] = {
            "description": "Fields and entries of the request that had no effect.",
            "required": False,
            "schema": {"type": "string"},
        }
    answered = {
        "description": (
            "The answer; with `stream`, a server-sent event per chunk, then `[DONE]`. A stream that"
            " fails half way has the error's body as its last event."
        ),
        "headers": headers,
        "content": {"text/event-stream": events},
    }
    return {200: answered, **error_responses(400, 404, 429, 503)}


async def respond(
    served: ServedModel,
    request: Request,
    build: Callable[[], PreparedRequest],
    answer: AnswerFormat,
    *,
    n: int,
    stream: bool,
) -> Response:
    """Generate ``n`` choices for each prompt, and respond. A client that goes away has them
    cancelled.

    ``build`` makes the prompts; like all that takes long, it runs in a thread. Raises its errors,
    and those of ``Choices``.
    """
    loop = asyncio.get_running_loop()
    trace = None if served.tracing is None else served.tracing.begin(request.headers)

    def begin() -> Choices:
        return Choices(served.llm, build(), n=n, loop=loop, trace=trace)

    choices = await served.encoding.run(request, begin)
    served.drain.add(choices)
    served.recent.begin(choices)
    if stream:
        return EventStream(choices, answer.events(choices, request.scope))
    async with choices.cancelled_on_disconnect(request.receive):
        outputs = await choices.outputs()
    note_answer(request.scope, choices, [output.finished for output in outputs])
    content = await run_in_threadpool(answer.whole, choices, outputs)
    timing = server_timing([output.finished.timing for output in outputs])
    return JSONResponse(content, headers={"Server-Timing": timing})


class EventStream(EventSourceResponse):
    """Sends the events of choices as they are generated, and cancels the choices when the client
    leaves. A comment every few seconds keeps the connection open while there is no event. A server
    that shuts down lets streams go on for as long as it waits for requests."""

    def __init__(
        self,
        choices: Choices,
        events: AsyncIterator[str] | AsyncIterator[dict[str, str]],
    ) -> None:
        """``events`` are texts, or have a name (``event``) and a text (``data``)."""
        super().__init__(events, sep="\n", shutdown_grace_period=math.inf)
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.cancel()  # also where the client left before the first event
        if not is_noted(scope):
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    if ends := await self._choices.ends():
                        note_answer(scope, self._choices, ends)


class CompletionAnswer(ABC):
    """The answer of a route of completions, whole or in chunks; one instance serves one request.
    Fields that are not set in a chunk are not sent."""

    _prompts: Sequence[Prompt]

    def __init__(self, llm: LLM, body: SamplingBody, kind: str) -> None:
        """``kind`` is what the answer's id begins with; the caller's own is in it, too."""
        self._llm = llm
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"{kind}-{body.request_id or secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": llm.model_name,
            "system_fingerprint": llm.system_fingerprint,
        }

    @abstractmethod
    def opening(self, index: int) -> BaseModel | None:
        """The choice that a stream begins with, if there is one."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> BaseModel | None:
        """A choice with new output; None if there is nothing to send yet."""

    @abstractmethod
    def closing(self, index: int, finished: Finished) -> BaseModel:
        """A choice that is finished."""

    @abstractmethod
    def chunk(self, choices: Sequence[Any]) -> BaseModel:
        """A chunk of a stream with these choices, and a field ``usage`` that is not set."""

    @abstractmethod
    def answer(self, answers: Sequence[Answer], usage: UsageBody) -> BaseModel:
        """The whole answer."""

    def whole(self, choices: Choices, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        reads = list(choices.prompts.values())
        self._prompts = [read.prompt for read in reads]
        answers = [Answer.from_events(*output) for output in outputs]
        usage = usage_body([answer.usage for answer in answers], choices.n, reads)
        link = ended_link(self._llm, reads, answers[0].explanation, answers[0].kept)
        content = self.answer(answers, usage).model_dump(exclude={"link"})
        return content if link is None else content | {"link": link.model_dump(exclude_unset=True)}

    async def events(self, choices: Choices, scope: Scope) -> AsyncIterator[str]:
        self._prompts = [read.prompt for read in choices.prompts.values()]
        options = self._body.stream_options or StreamOptions()
        link = link_body(choices.prompts.values())
        generated = [0] * len(choices)

        def chunk(index: int, choice: BaseModel) -> str:
            nonlocal link
            added: dict[str, Any] = {"usage": None} if options.include_usage else {}
            if options.continuous_usage_stats:
                prompt, tokens = len(self._prompts[index // choices.n]), generated[index]
                added["usage"] = UsageBody(
                    prompt_tokens=prompt, completion_tokens=tokens, total_tokens=prompt + tokens
                )
            if link is not None:  # the first chunk has it, and once more one with an explanation
                added["link"], link = link, None
            return _encoded(self.chunk([choice]).model_copy(update=added))

        finished: dict[int, Finished] = {}
        try:
            for index in range(len(choices)):
                if opening := self.opening(index):
                    yield chunk(index, opening)
            async for index, event in choices.events():
                if isinstance(event, Finished):
                    finished[index] = event
                    if event.explanation or event.kept:
                        link = await run_in_threadpool(
                            ended_link,
                            self._llm,
                            choices.prompts.values(),
                            event.explanation,
                            event.kept,
                        )
                    yield chunk(index, self.closing(index, event))
                else:
                    generated[index] += len(event.token_ids)
                    if choice := self.delta(index, event):
                        yield chunk(index, choice)
            usage = note_answer(scope, choices, [finished[index] for index in sorted(finished)])
            if options.include_usage:
                yield _encoded(self.chunk([]).model_copy(update={"usage": usage}))
        except Exception as error:
            yield _encoded(error_body(failure_of(error, scope), scope))
        yield "[DONE]"


def note_answer(scope: Scope, choices: Choices, finished: Sequence[Finished]) -> UsageBody:
    """Note an answer's figures for the access log, and return its usage."""
    reads = list(choices.prompts.values())
    usage = usage_body([each.usage for each in finished], choices.n, reads)
    assert usage.prompt_tokens_details is not None
    prompts = [each.usage for each in finished[:: choices.n]]
    uncomputed = max(0, sum(len(read.prompt) for read in reads) - usage.prompt_tokens)
    begun = [end for end in finished if end.usage.output_tokens or end.reason != "cancelled"]
    ttft = min((end.timing.ttft for end in begun), default=None)
    tenant = caller_of(scope).tenant
    decoded = sum(end.timing.decode for end in begun)
    behind_first = usage.completion_tokens - len(begun)
    answered = RecentRequest(
        at=int(time.time()),
        tenant=tenant,
        model=served_by(scope).llm.model_name,
        policy=reads[0].policy.name,
        cached=sum(each.cached_tokens for each in prompts),
        recomputed=sum(each.recomputed_tokens for each in prompts),
        fresh=sum(each.fresh_tokens for each in prompts),
        reusable=usage.prompt_tokens_details.reusable_tokens,
        uncomputed=uncomputed,
        output_tokens=usage.completion_tokens,
        ttft_ms=None if ttft is None else round(ttft * 1000, 1),
        tokens_per_second=round(behind_first / decoded, 1) if behind_first > 0 < decoded else None,
    )
    note_tokens(scope, usage.prompt_tokens + uncomputed, usage.completion_tokens)
    note_link(
        scope,
        cached=answered.cached,
        recomputed=answered.recomputed,
        fresh=answered.fresh,
        reusable=answered.reusable,
        uncomputed=uncomputed,
        ttft=ttft,
        policy=answered.policy,
    )
    served_by(scope).recent.add(tenant, answered)
    return usage


def usage_body(usages: Sequence[Usage], n: int, reads: Sequence[ReadPrompt]) -> UsageBody:
    """Add up the usage of an answer's choices, ``n`` to each of the prompts ``reads``, whose tokens
    are those of its first choice."""
    prompts = usages[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    output_tokens = sum(usage.output_tokens for usage in usages)
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            exact_cached_tokens=sum(usage.exact_cached_tokens for usage in prompts),
            recomputed_tokens=sum(usage.recomputed_tokens for usage in prompts),
            reusable_tokens=sum(
                read.reusable_of(usage) for read, usage in zip(reads, prompts, strict=True)
            ),
        ),
    )


def server_timing(timings: Sequence[Timing]) -> str:
    """Return the value of the ``Server-Timing`` header, in milliseconds: for each phase, the
    longest time of any choice."""
    phases = ("queue", "load", "link", "decode")
    longest = {phase: max(getattr(timing, phase) for timing in timings) for phase in phases}
    return ", ".join(f"{phase};dur={seconds * 1000:.3f}" for phase, seconds in longest.items())


def _encoded(body: BaseModel) -> str:
    return body.model_dump_json(exclude_unset=True)
