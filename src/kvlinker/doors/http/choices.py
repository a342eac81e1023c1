"""The choices of HTTP requests while they are generated: events pass from the engine's thread to
the event loop. Behind them, the running and the last requests (for /status and the log), and traces
by OpenTelemetry: a span for each choice, with one for each of its stages.

FastAPI makes the span of the HTTP request around them. Without the extra ``otel``, or if
OpenTelemetry is not set up, nothing is traced, and requests are not slowed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakSet

from starlette.types import Receive

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import Delta
from kvlinker.doors.http.edge.bodies import wait_for_disconnect
from kvlinker.doors.http.edge.errors import blame
from kvlinker.doors.http.fields.server_status import RecentRequest, RunningRequest
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, RequestHandle
from kvlinker.engines.contract.output import inbox_of
from kvlinker.llm import LLM, ChoiceSink, ReadPrompt
from kvlinker.service.reading.reader import PreparedRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

T = TypeVar("T")

MOST_KEPT = 256
"""The most requests that are remembered, of all tenants together."""

MOST_SHOWN = 20
"""The most requests that a caller is shown."""

LEAST_REUSABLE = 1024
"""The tokens that other settings would have found cached, after which the log says so: fewer are
computed in a second or so."""

logger = logging.getLogger(__name__)

STAGES = ("load", "queue", "link", "decode")
"""The stages of a choice in their order; each is a field of ``Timing`` and the name of a span."""


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


class RecentRequests:
    """The running requests and the last ones; a tenant sees its own, and an admin all. Methods may
    be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: WeakSet[Choices] = WeakSet()
        self._requests: deque[tuple[str, RecentRequest]] = deque(maxlen=MOST_KEPT)
        self._prompt_tokens = 0
        self._is_said = False
        self.reusable = 0
        """The tokens since the start that would have been cached with ``implicit = "auto"``."""

    def begin(self, choices: Choices) -> None:
        """Count a request as running until its choices have ended."""
        with self._lock:
            self._running.add(choices)

    def running(self, tenant: str | None) -> list[RunningRequest]:
        """Return a tenant's requests that are being answered, the last one first; None for those of
        all."""
        now = time.monotonic()
        with self._lock:
            begun = [choices for choices in self._running if not choices.ended]
        shown = [each for each in begun if tenant in (None, each.tenant)]
        return [
            RunningRequest(
                tenant=each.tenant,
                policy=next(iter(each.prompts.values())).policy.name,
                seconds=round(now - each.began, 1),
                prompt_tokens=sum(len(read.prompt) for read in each.prompts.values()),
                output_tokens=each.output_tokens,
            )
            for each in sorted(shown, key=lambda each: each.began, reverse=True)[:MOST_SHOWN]
        ]

    def add(self, tenant: str, request: RecentRequest) -> None:
        """Remember a request that has ended; say once in the log if other settings would spare
        much."""
        with self._lock:
            self._requests.append((tenant, request))
            self.reusable += request.reusable
            self._prompt_tokens += request.cached + request.recomputed + request.fresh
            says = self.reusable >= LEAST_REUSABLE and not self._is_said
            self._is_said = self._is_said or says
        if says:
            logger.info(
                "Of %d prompt tokens so far, %d stood in earlier prompts at another place, and were"
                " computed again. With --implicit auto (KVLINKER_IMPLICIT=auto) they are found.",
                self._prompt_tokens,
                self.reusable,
            )

    def of(self, tenant: str | None) -> list[RecentRequest]:
        """Return a tenant's last requests, the last one first; None for those of all."""
        with self._lock:
            kept = list(self._requests)
        shown = [request for owner, request in reversed(kept) if tenant in (None, owner)]
        return shown[:MOST_SHOWN]


class Tracing:
    """Makes the traces of requests' choices."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """With None for ``provider``, the one that a program has set up for itself is used. Raises
        ImportError if OpenTelemetry is not installed."""
        from opentelemetry import trace

        self._tracer = trace.get_tracer("kvlinker", version("kvlinker"), provider)

    @classmethod
    def if_installed(cls, provider: TracerProvider | None = None) -> Tracing | None:
        """Make one; None if OpenTelemetry is not installed."""
        try:
            return cls(provider)
        except ImportError:
            return None

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """Return the trace of the choices of the HTTP request that the caller answers, and that has
        these headers.

        Their spans belong to the request's span, or, where it has none, to the one that
        ``traceparent`` names.
        """
        from opentelemetry import context, propagate, trace

        is_traced = trace.get_current_span().get_span_context().is_valid
        return RequestTrace(
            self._tracer, context.get_current() if is_traced else propagate.extract(headers)
        )


class RequestTrace:
    """Traces the choices of one HTTP request."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        """Begin now; spans belong to the one of ``parent``."""
        self._tracer = tracer
        self._parent = parent
        self._begun = time.time_ns()

    def ended(self, choice: int, prompt: ReadPrompt, event: Finished | Failed) -> None:
        """Make the spans of a choice that ends now; ``choice`` is its number among those of its
        prompt."""
        now = time.time_ns()
        finished = event if isinstance(event, Finished) else None
        stages = [] if finished is None else _stages(finished, now)
        span = self._tracer.start_span(
            "generate",
            self._parent,
            attributes={
                "kvlinker.policy": prompt.policy.name,
                "kvlinker.chunks": len(prompt.prompt.spans),
                "kvlinker.choice": choice,
                **_usage(event),
            },
            start_time=stages[0][1] if stages else self._begun,
        )
        if not span.is_recording():
            return
        from opentelemetry import trace

        if finished is None:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span, self._parent)
        for name, begin, end in stages:
            self._tracer.start_span(name, inside, start_time=begin).end(end)
        span.end(now)


def _usage(event: Finished | Failed) -> dict[str, Any]:
    """Return the attributes of a choice's span: how it ended, and its costs."""
    if isinstance(event, Failed):
        return {"error.type": event.error.code}
    usage = event.usage
    return {
        "kvlinker.tokens.cached": usage.cached_tokens,
        "kvlinker.tokens.exact_cached": usage.exact_cached_tokens,
        "kvlinker.tokens.recomputed": usage.recomputed_tokens,
        "kvlinker.tokens.fresh": usage.fresh_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.response.finish_reasons": (event.reason,),
    }


def _stages(finished: Finished, now: int) -> list[tuple[str, int, int]]:
    """Return the name, begin and end of each stage of a choice that ends ``now``; times are in
    nanoseconds of Unix time, and stages that took no time are left out."""
    stages = []
    for name in reversed(STAGES):
        begin = now - round(getattr(finished.timing, name) * 1e9)
        if begin < now:
            stages.append((name, begin, now))
        now = begin
    return stages[::-1]
