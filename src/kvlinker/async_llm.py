"""The Python API for asyncio: the calls of ``LLM``, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from kvlinker.base.arguments import names_arguments, takes_fields_of
from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import Delta
from kvlinker.base.types.messages import Implicit
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, RequestHandle
from kvlinker.linking import Policy
from kvlinker.llm import LLM, Prompt, ReadPrompt
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.request_tools import ToolChoice
from kvlinker.service.answer import Answer
from kvlinker.service.content import CompletionContent
from kvlinker.service.prompt_calls import Documents, Messages
from kvlinker.settings import Options

P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(
    call: Callable[Concatenate[LLM, P], T],
) -> Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]:
    """Return the method of ``AsyncLLM`` that runs a method of ``LLM`` in a thread."""

    @wraps(call)
    async def method(self: AsyncLLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(call, self.llm, *args, **kwargs)

    return method


@names_arguments
class AsyncLLM:
    """A model that answers prompts made of cached chunks and fresh text, for asyncio.

    ``model`` and ``options`` are those of ``LLM``, and so are the calls, but for ``stream``. A task
    that is cancelled cancels its request. ``llm`` is the ``LLM`` behind it; loading a model blocks,
    as there.
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[Options]) -> None:
        self.llm = LLM(model, **options)

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Return the same model for asyncio; whoever closes one closes both."""
        made = cls.__new__(cls)
        made.llm = llm
        return made

    generate_context_cache = _in_thread(LLM.generate_context_cache)
    split = _in_thread(LLM.split)
    split_pieces = _in_thread(LLM.split_pieces)
    score = _in_thread(LLM.score)
    explain = _in_thread(LLM.explain)
    expire_cache = _in_thread(LLM.expire_cache)
    expire_caches = _in_thread(LLM.expire_caches)
    update_cache = _in_thread(LLM.update_cache)
    list_caches = _in_thread(LLM.list_caches)
    read_cache = _in_thread(LLM.read_cache)
    search = _in_thread(LLM.search)
    caches_usage = _in_thread(LLM.caches_usage)
    close = _in_thread(LLM.close)

    @overload
    async def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        stream: Literal[False] = False,
        **sampling: Any,
    ) -> Answer: ...

    @overload
    async def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        stream: Literal[True],
        **sampling: Any,
    ) -> AsyncIterator[str]: ...

    @takes_fields_of(SamplingParams)
    async def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        stream: bool = False,
        **sampling: Any,
    ) -> Answer | AsyncIterator[str]:
        """Answer a conversation, or a prompt, as ``LLM.chat_completion`` does.

        With ``stream``, return an iterator over the answer's text, which comes in pieces as it is
        generated. Closing the iterator cancels the request. Raises InvalidRequestError for
        ``stream`` with tools, too.
        """
        if stream and tools and tool_choice != "none":
            raise InvalidRequestError(
                "'stream' gives the answer's text alone, in which no calls of 'tools' are. Leave"
                " one of them out.",
                param="stream",
            )
        asked = await asyncio.to_thread(
            self.llm.ask_chat,
            messages,
            documents=documents,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            policy=policy,
            implicit=implicit,
            tenant=tenant,
            sampling=sampling,
        )
        events = self._events(asked.read, asked.sampling, tenant)
        if stream:
            return _texts(events, asked.reader)
        return (await _answer(events, asked.read)).read_by(asked.reader)

    @takes_fields_of(SamplingParams)
    async def completion(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        **sampling: Any,
    ) -> Answer:
        """Continue a text, token ids, or a list of texts and context caches; no chat template."""
        read = await asyncio.to_thread(
            self.llm.read_completion, prompt, policy=policy, implicit=implicit, tenant=tenant
        )
        params = self.llm.sampling_params(**sampling)
        return await _answer(self._events(read, params, tenant), read)

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events(
        self, read: ReadPrompt, params: SamplingParams, tenant: str
    ) -> AsyncGenerator[Delta | Finished, None]:
        """Submit a request, and yield its events as they come. Raises the error of one that
        failed."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[GenerationEvent] = asyncio.Queue()

        def sink(_: int, event: GenerationEvent) -> None:
            with suppress(RuntimeError):  # the loop was closed while the engine still cancelled
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> RequestHandle:
            return self.llm.submit(read, params, sink, tenant=tenant)

        handle = await _cancelled_with_its_task(submit)
        try:
            event: GenerationEvent | None = None
            while not isinstance(event, Finished):
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
        finally:
            handle.cancel()


async def _cancelled_with_its_task(submit: Callable[[], RequestHandle]) -> RequestHandle:
    """Submit in a thread; a request whose task is cancelled meanwhile is cancelled as soon as it is
    there."""

    def cancel(done: asyncio.Future[RequestHandle]) -> None:
        if done.exception() is None:
            done.result().cancel()

    submitted = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:
        submitted.add_done_callback(cancel)
        raise


async def _answer(events: AsyncGenerator[Delta | Finished, None], read: ReadPrompt) -> Answer:
    """Join the events of a request. Raises the error of one that failed."""
    async with aclosing(events):
        *deltas, finished = [event async for event in events]
    assert isinstance(finished, Finished), "the last event of a request that did not fail"
    pieces = [event for event in deltas if isinstance(event, Delta)]
    return replace(Answer.from_events(pieces, finished), context_caches=read.linked)


async def _texts(
    events: AsyncGenerator[Delta | Finished, None], reader: Reader
) -> AsyncGenerator[str, None]:
    """Yield the texts of a request's events; closing it closes the request."""
    async with aclosing(events):
        async for event in events:
            said = (
                reader.feed(event.text)
                if isinstance(event, Delta)
                else reader.finish(cut=event.reason != "stop")
            )
            for piece in said:
                if piece.kind == "content":
                    yield piece.text
