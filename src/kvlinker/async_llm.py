"""The Python API for asyncio: the calls of ``LLM``, to be awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from kvlinker.base.types.answers import AnswerPiece
from kvlinker.base.types.chunks import GenerationContext
from kvlinker.base.types.messages import CachedPart, CompletionPrompt, Implicit, TemplateOptions
from kvlinker.base.types.sampling import SamplingFields
from kvlinker.base.types.tenants import DEFAULT_TENANT, Scope
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, RequestHandle
from kvlinker.engines.contract.output import inbox_of
from kvlinker.linking import Explanation, Policy
from kvlinker.llm import LLM, Prompt, progress_bar
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.service.answer import Answer, AnswerBuilder, ChoiceSink
from kvlinker.service.content import (
    ChatOptions,
    CompletionContent,
    Documents,
    Messages,
    refuse_tools_in_text,
)
from kvlinker.service.context_caches.checks import texts_of
from kvlinker.service.context_caches.creation import Metadata
from kvlinker.settings import Options
from kvlinker.store import ContextCache

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


def _awaited(
    call: Callable[Concatenate[LLM, P], T], begin: Callable[Concatenate[LLM, P], Future[T]]
) -> Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]:
    """Return the method of ``AsyncLLM`` that begins in a thread what a method of ``LLM`` returns:
    no thread waits for it."""

    @wraps(call)
    async def method(self: AsyncLLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _result_of(await asyncio.to_thread(begin, self.llm, *args, **kwargs))

    return method


class AsyncLLM:
    """A model that answers prompts made of cached chunks and fresh text, for asyncio.

    ``model`` and ``options`` are those of ``LLM``, and so are the calls. A task that is cancelled
    cancels its answer or explanation; context caches and scores are computed to the end. ``llm`` is
    the ``LLM`` behind it; loading a model blocks, as there.
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[Options]) -> None:
        self.llm = LLM(model, **options)

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Return the same model for asyncio. To close one closes both."""
        made = cls.__new__(cls)
        made.llm = llm
        return made

    settle = _in_thread(LLM.settle)
    split = _in_thread(LLM.split)
    split_pieces = _in_thread(LLM.split_pieces)
    score = _awaited(LLM.score, LLM.begin_score)
    expire_cache = _in_thread(LLM.expire_cache)
    expire_caches = _in_thread(LLM.expire_caches)
    update_cache = _in_thread(LLM.update_cache)
    list_caches = _in_thread(LLM.list_caches)
    read_cache = _in_thread(LLM.read_cache)
    search = _in_thread(LLM.search)
    embed = _in_thread(LLM.embed)
    caches_usage = _in_thread(LLM.caches_usage)
    close = _in_thread(LLM.close)

    async def generate_context_cache(
        self,
        chunks: str | Sequence[str],
        *,
        ttl: float | None = None,
        name: str | None = None,
        metadata: Metadata | None = None,
        context: GenerationContext | str | None = None,
        pinned: bool = False,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
        progress: bool | None = None,
    ) -> tuple[ContextCache, ...]:
        """Compute and keep the KV of each chunk, as ``LLM.generate_context_cache`` does."""
        texts = texts_of(chunks)
        with progress_bar(len(texts), progress) as advance:
            created = await asyncio.to_thread(
                self.llm.begin_context_caches,
                texts,
                ttl=ttl,
                name=name,
                metadata=metadata,
                context=context,
                pinned=pinned,
                scope=scope,
                tenant=tenant,
                advance=advance,
            )
            return await _result_of(created)

    async def explain(
        self,
        messages: Messages | None = None,
        *,
        documents: Documents = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        prompt: CompletionContent | CompletionPrompt[CachedPart] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        attention: bool = False,
        tenant: str = DEFAULT_TENANT,
    ) -> Explanation:
        """Explain how a conversation, or a completion's ``prompt``, is linked, as ``LLM.explain``
        does."""
        begin = partial(
            self.llm.begin_explain,
            messages,
            documents=documents,
            options=options,
            prompt=prompt,
            policy=policy,
            implicit=implicit,
            attention=attention,
            tenant=tenant,
        )
        explaining, read = await _cancelled_with_its_task(begin, lambda begun: begun[0].cancel())
        explanation = await asyncio.wrap_future(explaining)  # and so cancelled with the task
        return await asyncio.to_thread(self.llm.described, explanation, read)

    @overload
    async def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    async def chat_completion(
        self, messages: Messages | Prompt, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[str]: ...

    async def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | AsyncIterator[str]:
        """Answer a conversation, or a prompt, as ``LLM.chat_completion`` does. Closing the iterator
        over the answer's text cancels the request."""
        if stream:
            refuse_tools_in_text(options)
        answering = await self.stream(messages, **options)
        return answering.texts() if stream else await answering.answer()

    async def stream(
        self, messages: Messages | Prompt, **options: Unpack[ChatOptions]
    ) -> AsyncAnswerStream:
        """Answer as ``LLM.stream`` does, from the first look at the stream on."""
        asked, builder = await asyncio.to_thread(self.llm.prepare_chat, messages, options)
        return AsyncAnswerStream(lambda sink: self.llm.submit_prepared(asked, sink), builder)

    async def completion(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        **sampling: Unpack[SamplingFields],
    ) -> Answer:
        """Continue a text, token ids, or a list of texts and context caches; no chat template."""
        prepare = partial(self.llm.prepare_completion, prompt, sampling)
        asked, builder = await asyncio.to_thread(
            prepare, policy=policy, implicit=implicit, tenant=tenant
        )
        submit = partial(self.llm.submit_prepared, asked)
        return await AsyncAnswerStream(submit, builder).answer()

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncAnswerStream(AsyncIterator[AnswerPiece]):
    """``AnswerStream`` for asyncio: yields the pieces of an answer. ``aclose`` and the end of an
    ``async with`` block cancel the request."""

    def __init__(
        self, submit: Callable[[ChoiceSink], RequestHandle], builder: AnswerBuilder
    ) -> None:
        """``submit`` submits a request for one choice, at the first look at the stream."""
        self._queue: asyncio.Queue[GenerationEvent | None] = asyncio.Queue()
        self._events = _events(submit, self._queue)
        self._is_waiting = self._is_closed = False
        self._failed: Failed | None = None  # raised at every later look: no other event comes
        self._builder = builder
        self._pieces: deque[AnswerPiece] = deque()

    async def __anext__(self) -> AnswerPiece:
        """Wait for the next piece. Raises the error of a request that failed."""
        try:
            while not self._pieces:
                if self._builder.finished:
                    raise StopAsyncIteration
                event = self._failed or await self._next_event()
                self._failed = event if isinstance(event, Failed) else None
                self._pieces.extend(self._builder.take(event))
        except BaseException:
            await self.aclose()
            raise
        return self._pieces.popleft()

    async def _next_event(self) -> GenerationEvent:
        self._is_waiting = True
        try:
            event = await anext(self._events)
        finally:
            self._is_waiting = False
        if self._is_closed:  # by another task, behind this event
            raise StopAsyncIteration
        return event

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the texts of the pieces that are content; closing it cancels the request."""
        async with self:
            async for piece in self:
                if piece.kind == "content":
                    yield piece.text

    async def answer(self) -> Answer:
        """Wait for the whole answer; pieces that were not taken meanwhile are skipped. Raises the
        error of a request that failed."""
        async for _ in self:
            pass
        return self._builder.answer()

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended; a task that waits for a piece meanwhile gets no
        more. Idempotent."""
        self._is_closed = True
        if self._is_waiting:
            self._queue.put_nowait(None)
        else:
            await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _result_of(begun: Future[T]) -> T:
    """Await what cannot be cancelled: a task that is cancelled meanwhile leaves it to its end."""
    return await asyncio.shield(asyncio.wrap_future(begun))


async def _events(
    submit: Callable[[ChoiceSink], RequestHandle], queue: asyncio.Queue[GenerationEvent | None]
) -> AsyncGenerator[GenerationEvent, None]:
    """Submit a request for one choice, and yield its events as they come through the ``queue``. A
    None there, and closing it, cancel the request."""
    inbox = inbox_of(asyncio.get_running_loop())

    def sink(_: int, event: GenerationEvent) -> None:
        inbox.put(queue.put_nowait, event)

    handle = await _cancelled_with_its_task(lambda: submit(sink), lambda begun: begun.cancel())
    try:
        while (event := await queue.get()) is not None:
            yield event
            if isinstance(event, Finished | Failed):
                return
    finally:
        handle.cancel()


async def _cancelled_with_its_task(begin: Callable[[], T], cancel: Callable[[T], object]) -> T:
    """Begin something in a thread; what is begun for a task that is cancelled meanwhile is
    cancelled as soon as it is there."""

    def end(done: asyncio.Future[T]) -> None:
        if done.exception() is None:
            cancel(done.result())

    beginning = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        return await asyncio.shield(beginning)
    except asyncio.CancelledError:
        beginning.add_done_callback(end)
        raise
