"""The choices of one HTTP request while they are generated: events pass from the engine's thread to
the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from starlette.types import Receive

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.loop_inbox import inbox_of
from kvlinker.base.types.answers import Delta
from kvlinker.doors.http.edge.errors import blaming
from kvlinker.doors.http.edge.leaving import left
from kvlinker.doors.http.tracing import RequestTrace
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, RequestHandle
from kvlinker.llm import LLM, ChoiceSink, ReadPrompt
from kvlinker.service.prompt_calls import PreparedRequest


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
        with self._cancelled_on_error():
            for number, (field, prompt) in enumerate(asked.prompts.items()):
                sink = self._sink(number * n, prompt, trace)
                fitting = asked._replace(sampling=llm.fitting(asked.sampling, prompt.prompt))
                with blaming(field):
                    handle = llm.submit_prepared(fitting, sink, number=number, n=n)
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
        with self._cancelled_on_error():
            while missing:
                index, event = await self._events.get()
                if isinstance(event, Failed):
                    raise event.error
                missing -= isinstance(event, Finished)
                yield index, event

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
            await left(receive)
            self.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()

    @contextmanager
    def _cancelled_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.cancel()
            raise

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
