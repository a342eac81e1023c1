"""The choices of one HTTP request while they are generated: from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from starlette.types import Receive

from kvlinker.engine.contract import Failed, GenerationEvent, RequestHandle
from kvlinker.llm import LLM
from kvlinker.prompt.segments import Prompt
from kvlinker.types.answers import Delta, Finished, Timing, TokenLogprob
from kvlinker.types.sampling import SamplingParams


class Generation:
    """``n`` choices for each prompt, numbered prompt by prompt, merged into one series of events."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        policy: str | None,
        n: int,
        tenant: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Queue all choices, or none; events go to ``loop``. Raises what ``LLM.submit`` raises.

        Planning takes a while for long prompts: call it in a thread.
        """
        self.n = n
        self.choices = len(prompts) * n
        self._loop = loop
        self._events: asyncio.Queue[tuple[int, GenerationEvent]] = asyncio.Queue()
        self._handles: list[RequestHandle] = []
        with self.cancelled_on_error():
            for number, prompt in enumerate(prompts):
                sink = self._sink(number * n)
                self._handles += llm.submit(prompt, sampling, sink, policy=policy, n=n, tenant=tenant)

    def cancel(self) -> None:
        """Free what the engine holds for choices that are not finished."""
        for handle in self._handles:
            handle.cancel()

    @contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Delta | Finished]]:
        """The choice's number and its next event, until all are finished. Raises the error of one that failed."""
        missing = self.choices
        with self.cancelled_on_error():
            while missing:
                index, event = await self._events.get()
                if isinstance(event, Failed):
                    raise event.error
                missing -= isinstance(event, Finished)
                yield index, event

    @asynccontextmanager
    async def cancelled_on_disconnect(self, receive: Receive) -> AsyncIterator[None]:
        """Cancel as soon as the client is gone; the request's body must have been read."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()

    async def outcomes(self) -> tuple[Outcome, ...]:
        """All choices, once they are finished."""
        deltas: list[list[Delta]] = [[] for _ in range(self.choices)]
        finished: dict[int, Finished] = {}
        async for index, event in self.events():
            if isinstance(event, Finished):
                finished[index] = event
            else:
                deltas[index].append(event)
        return tuple(Outcome.of(deltas[index], finished[index]) for index in range(self.choices))

    def _sink(self, first: int) -> Callable[[int, GenerationEvent], None]:
        def sink(index: int, event: GenerationEvent) -> None:
            with suppress(RuntimeError):  # the loop was closed while the engine still cancelled
                self._loop.call_soon_threadsafe(self._events.put_nowait, (first + index, event))

        return sink


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one choice came to."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished

    @classmethod
    def of(cls, deltas: Sequence[Delta], finished: Finished) -> Outcome:
        return cls(
            text="".join(delta.text for delta in deltas),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finished=finished,
        )


def server_timing(timings: Sequence[Timing]) -> str:
    """The header of that name, in milliseconds; of several choices, the longest time of each phase."""
    phases = ("queue", "load", "link", "decode")
    longest = {phase: max(getattr(timing, phase) for timing in timings) for phase in phases}
    return ", ".join(f"{phase};dur={seconds * 1000:.3f}" for phase, seconds in longest.items())
