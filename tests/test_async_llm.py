"""``AsyncLLM`` does on an event loop what ``LLM`` does, and a task that ends early ends its
request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from inspect import getmembers, isfunction, signature
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlinker import LLM, AsyncLLM
from kvlinker.async_llm import AsyncAnswerStream
from kvlinker.base.errors import InvalidRequestError, PolicyError, StoreError
from kvlinker.base.types.answers import Delta
from kvlinker.engines.contract.contract import Failed, RequestHandle
from kvlinker.service.answer import AnswerBuilder, ChoiceSink
from tests.doors.http.serving import Served
from tests.waiting import PATIENCE, wait_until

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def llm(served: Served) -> AsyncLLM:
    return AsyncLLM.from_llm(served.llm)


async def test_answers_are_those_of_llm(served: Served, llm: AsyncLLM) -> None:
    cache, other = await llm.generate_context_cache(["The cat sat on the mat.", "numbers 1 2 3"])
    messages: Any = [{"role": "user", "content": [other, cache, "What do the two have in common?"]}]
    expected = served.llm.chat_completion(messages, policy="naive", **GREEDY)
    answer = await llm.chat_completion(messages, policy="naive", **GREEDY)
    assert (answer.text, answer.usage, answer.context_caches) == (
        expected.text,
        expected.usage,
        expected.context_caches,
    )
    pieces = [
        piece
        async for piece in await llm.chat_completion(
            messages, policy="naive", stream=True, **GREEDY
        )
    ]
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text
    assert (await llm.completion("numbers", **GREEDY)).text == served.llm.completion(
        "numbers", **GREEDY
    ).text
    await llm.expire_cache(cache)


async def test_a_prompt_that_is_made_already_is_answered(served: Served, llm: AsyncLLM) -> None:
    prompt = served.llm.chat_prompt(HELLO)
    expected = served.llm.chat_completion(prompt, **GREEDY)
    assert (await llm.chat_completion(prompt, **GREEDY)).text == expected.text


async def test_the_audit_is_told_which_chunks_had_no_ids(
    served: Served, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def watch(request: Any, sink: Any, *, implicit: bool) -> Any:
        told.append(implicit)
        return request, sink

    monkeypatch.setattr(served.llm.policy_manager, "auditor", SimpleNamespace(watch=watch))
    (cache,) = await llm.generate_context_cache(["The cat sat on the mat."])
    marked = {
        "type": "text",
        "text": "Nobody gave this text an id.",
        "cache_control": {"type": "ephemeral"},
    }
    for part in (marked, cache):
        messages: Any = [{"role": "user", "content": [part, "What is this?"]}]
        await llm.chat_completion(messages, **GREEDY)
    assert told == [True, False]


async def test_many_at_once(llm: AsyncLLM) -> None:
    answers = await asyncio.gather(*(llm.chat_completion(HELLO, **GREEDY) for _ in range(12)))
    assert len({answer.text for answer in answers}) == 1


async def test_long_calls_hold_up_no_others(
    served: Served, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them there are: no thread waits for what the engine computes."""
    waiting: list[Future[Any]] = []

    def begin(*_: Any, **__: Any) -> Future[Any]:
        waiting.append(Future())
        return waiting[-1]

    monkeypatch.setattr(served.llm.caches, "create", begin)
    monkeypatch.setattr(served.llm.engine, "score", begin)
    calls = [llm.generate_context_cache("A text."), llm.score("numbers 1 2 3")]
    calls += [llm.generate_context_cache("A text.") for _ in range(40)]
    tasks = [asyncio.create_task(call) for call in calls]
    while len(waiting) < min(len(tasks), 4):
        await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE):
        assert (await llm.chat_completion(HELLO, **GREEDY)).usage.output_tokens == 6
    for task in tasks[:2]:
        task.cancel()
    for each in waiting:
        each.set_result(())
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done[2:] == [()] * 40


async def test_an_explanation_ends_with_its_task(
    served: Served, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await llm.explain(HELLO, policy="naive")
    expected = served.llm.explain(HELLO, policy="naive")
    assert (told.token_ids, told.texts) == (expected.token_ids, expected.texts)
    waiting: Future[Any] = Future()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begin(_: object) -> Future[Any]:
        loop.call_soon_threadsafe(begun.set)
        return waiting

    monkeypatch.setattr(served.llm.engine, "explain", begin)
    task = asyncio.create_task(llm.explain(HELLO))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, waiting.cancelled)


async def test_mistakes(llm: AsyncLLM) -> None:
    with pytest.raises(PolicyError):
        await llm.chat_completion(HELLO, policy="nope")
    with pytest.raises(InvalidRequestError):
        await llm.chat_completion(HELLO, temperature=-1)
    with pytest.raises(InvalidRequestError):
        await anext(await llm.chat_completion(HELLO, stream=True, temperature=-1))


async def test_a_task_that_ends_early_ends_its_request(served: Served, llm: AsyncLLM) -> None:
    task = asyncio.create_task(llm.chat_completion(HELLO, **LONG))
    while served.llm.current_load().running == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(served.wait_until_idle)
    async with aclosing(cast(Any, await llm.chat_completion(HELLO, stream=True, **LONG))) as stream:
        assert isinstance(stream, AsyncIterator)
        await anext(stream)
        assert served.llm.current_load().running == 1
    await asyncio.to_thread(served.wait_until_idle)


async def test_a_stream_has_pieces_and_the_whole(served: Served, llm: AsyncLLM) -> None:
    expected = served.llm.chat_completion(HELLO, **GREEDY)
    async with await llm.stream(HELLO, **GREEDY) as stream:
        pieces = [piece async for piece in stream]
        answer = await stream.answer()
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == answer.text == expected.text
    assert answer.usage.output_tokens == expected.usage.output_tokens
    async with await llm.stream(HELLO, **LONG) as stream:
        await anext(stream)
    await asyncio.to_thread(served.wait_until_idle)
    with pytest.raises(InvalidRequestError, match="closed before"):
        await stream.answer()


async def test_another_task_closes_a_stream(served: Served, llm: AsyncLLM) -> None:
    stream = await llm.stream(HELLO, **LONG)

    async def read() -> int:
        return len([piece async for piece in stream])

    reading = asyncio.create_task(read())
    while served.llm.current_load().running == 0:
        await asyncio.sleep(0.01)
    await stream.aclose()
    assert await reading < LONG["max_tokens"]
    await asyncio.to_thread(served.wait_until_idle)
    await stream.aclose()
    with pytest.raises(InvalidRequestError, match="closed before"):
        await stream.answer()


async def test_a_closed_stream_gives_no_piece_that_came_before() -> None:
    sinks: list[ChoiceSink] = []
    cancelled = asyncio.Event()

    def submit(sink: ChoiceSink) -> RequestHandle:
        sinks.append(sink)
        return RequestHandle(cancelled.set)

    stream = AsyncAnswerStream(submit, AnswerBuilder())
    reading = asyncio.ensure_future(anext(stream, None))
    while not stream._is_waiting or not sinks:
        await asyncio.sleep(0.01)
    stream._queue.put_nowait(Delta("Oslo", (1,)))
    await stream.aclose()
    assert await reading is None
    assert cancelled.is_set()


async def test_who_asks_again_after_a_failure_learns_it_again() -> None:
    def submit(sink: ChoiceSink) -> RequestHandle:
        sink(0, Failed(StoreError("The disk is full.")))
        return RequestHandle(lambda: None)

    stream = AsyncAnswerStream(submit, AnswerBuilder())
    for _ in range(2):
        with pytest.raises(StoreError):
            await anext(stream)
    with pytest.raises(StoreError):
        await stream.answer()


def test_it_has_the_calls_of_llm() -> None:
    """All but those that others build upon, and those that block nobody, which its ``llm`` has."""
    building = {
        "chat_prompt",
        "read_chat",
        "read_completion",
        "submit",
        "sampling_params",
    }
    building |= {"prepare_chat", "request_tools", "described", "fitting"}
    building |= {"prepare_completion", "submit_prepared", "begin_explain"}
    building |= {"begin_score", "begin_context_caches"}
    at_once = {
        "default_policy",
        "current_load",
        "prefill_rate",
        "tiers",
        "bandwidths",
        "spilled_bytes",
        "held_bytes",
        "policies",
        "token_ids",
        "tail_of",
        "token_bytes",
        "token_text",
        "decode_ids",
        "text_of",
    }
    calls = {name for name, _ in getmembers(LLM, isfunction) if name[0] != "_"} - building - at_once
    assert calls == {
        name for name, call in vars(AsyncLLM).items() if isfunction(call) and name[0] != "_"
    }
    for name in calls:
        taken = signature(getattr(AsyncLLM, name)).parameters
        assert list(taken.values()) == list(signature(getattr(LLM, name)).parameters.values())
        assert getattr(AsyncLLM, name).__doc__
