"""kvlinker's ``Engine`` over vLLM: the server, the Python interface and the benchmarks run on it unchanged."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvlinker.engine.contract import EngineLoad, GenerationRequest, Sink
from kvlinker.engine.explaining import explanation_of
from kvlinker.engine.limits import RequestLimits
from kvlinker.errors import EngineClosedError, InvalidRequestError, KVLinkerError, OverloadedError
from kvlinker.events import Events
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.plan import chunk_uses
from kvlinker.store import ChunkStore
from kvlinker.types.answers import PromptLogprobs
from kvlinker.types.chunks import Chunk
from kvlinker.vllm.frontend.chunk_provider import ChunkProvider
from kvlinker.vllm.frontend.client import SPARE_TOKENS, VLLMClient
from kvlinker.vllm.frontend.generation import Generation
from kvlinker.vllm.frontend.model_facts import ModelFacts
from kvlinker.vllm.frontend.planning import PlannedLink, Planner, check_policy
from kvlinker.vllm.protocol.transfer_plan import LinkOrder

T = TypeVar("T")

logger = logging.getLogger(__name__)

STORE_THREADS = 4
CLOSE_SECONDS = 30.0


class VLLMEngine:
    """See ``kvlinker.engine.contract`` for the contract."""

    def __init__(
        self,
        client: VLLMClient,
        facts: ModelFacts,
        *,
        store: ChunkStore,
        events: Events,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self.fingerprint = facts.fingerprint
        self.kv_bytes_per_token = facts.kv_bytes_per_token
        pool = client.pool
        self.max_model_len = pool.max_model_len
        self._slots = pool.slots
        self._client = client
        self._facts = facts
        self._store = store
        self._events = events
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._limits = RequestLimits(facts.vocabulary, self.max_model_len)
        self._executor = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="kvlinker-store")
        longest = self.max_model_len - SPARE_TOKENS
        self._chunks = ChunkProvider(
            client,
            store,
            self._executor,
            fingerprint=facts.fingerprint,
            token_bytes=facts.kv_bytes_per_token,
            longest=longest,
        )
        self._planner = Planner(client, self._chunks, self._executor, layers=len(facts.layers), longest=longest)
        self._closing = False
        self._active: dict[str, Generation] = {}  # single operations on it are atomic
        self._tasks: dict[str, asyncio.Task[None]] = {}  # the loop's
        atexit.register(self.close)

    @property
    def healthy(self) -> bool:
        return not self._closing and self._client.healthy

    def cache_chunk(self, chunk: Chunk, *, tenant: str) -> Future[int]:
        self._refuse_if_closing()
        self._limits.check_vocabulary(np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64), param="chunks")
        return self._client.run(self._translated(self._chunks.cache(chunk, tenant)))

    def generate(self, request: GenerationRequest, sink: Sink) -> _Handle:
        self._refuse_if_closing()
        check_policy(request.policy)
        max_tokens = self._limits.max_tokens(request)
        waiting = len(self._active) - self._max_running
        if waiting >= self._max_waiting:
            raise OverloadedError(f"{waiting} requests wait already; try again later.", retry_after=1)
        generation = Generation(
            request, sink, tokenizer=self._facts.tokenizer, max_tokens=max_tokens, events=self._events
        )
        name = f"kvlinker-{secrets.token_hex(8)}"
        self._active[name] = generation
        self._client.loop.call_soon_threadsafe(self._start, name, generation)
        return _Handle(partial(self._cancel, name))

    def explain(self, request: GenerationRequest) -> Future[Explanation]:
        self._refuse_if_closing()
        check_policy(request.policy)
        self._limits.max_tokens(request)
        return self._client.run(self._translated(self._explain(request)))

    def score(self, request: GenerationRequest) -> Future[PromptLogprobs]:
        raise InvalidRequestError(
            "The vllm engine cannot score prompts: vLLM tells log probabilities of prompts only where nothing is "
            "linked. Use the embedded engine.",
            param="prompt",
        )

    def load(self) -> EngineLoad:
        """vLLM's own figures are in its process: these are the requests under way, and their tokens so far."""
        active = list(self._active.values())
        running = min(len(active), self._max_running)
        used = sum(generation.tokens for generation in active)
        return EngineLoad(running, len(active) - running, min(used, self._slots), self._slots)

    def prefill_seconds(self, tokens: int) -> float | None:
        """None: vLLM does not tell how long it computes."""
        return None

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        try:
            if self._client.loop.is_running():
                self._client.run(self._cancel_all()).result(timeout=CLOSE_SECONDS)
        finally:
            self._client.close()
            self._executor.shutdown()

    def _start(self, name: str, generation: Generation) -> None:
        task = self._client.loop.create_task(self._serve(name, generation))
        self._tasks[name] = task
        task.add_done_callback(partial(self._served, name, generation))

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all requests with it
            self._client.loop.call_soon_threadsafe(self._cancel_task, name)

    def _cancel_task(self, name: str) -> None:
        if name in self._tasks:
            self._tasks[name].cancel()

    async def _serve(self, name: str, generation: Generation) -> None:
        request = generation.request
        link = await self._planner.link(request)
        generation.mark_loaded()
        link = await self._planner.refine(link)
        generation.mark_planned(link)
        order = link.order
        outputs = self._client.stream(
            name,
            link.plan.prompt.tokens.tolist(),
            request.sampling,
            max_tokens=generation.max_tokens,
            order=order,
            salt=salt_of(order, request.tenant),
        )
        async with contextlib.aclosing(outputs):
            async for new in outputs:
                generation.accept(new)
                if generation.ended:
                    break
        await self._client.loop.run_in_executor(self._executor, self._note_use, link, request.tenant)

    def _note_use(self, link: PlannedLink, tenant: str) -> None:
        for use in chunk_uses(link.plan, len(self._facts.layers), link.dropped):
            self._store.note_use(self._chunks.key(use.chunk, tenant), use.recomputed)

    def _served(self, name: str, generation: Generation, done: asyncio.Task[None]) -> None:
        """The request is at an end, whatever it is."""
        del self._tasks[name]
        del self._active[name]
        if not done.cancelled():
            error = done.exception()
            if error is not None:
                generation.fail(self._error_of(error))
        elif self._closing:
            generation.fail(_closed())
        generation.cancel()

    async def _explain(self, request: GenerationRequest) -> Explanation:
        link = await self._planner.refine(await self._planner.link(request), explains=True)
        return explanation_of(
            link.plan,
            link.refinement,
            link.evidence,
            asked=request.policy,
            layers=len(self._facts.layers),
            cost=self._facts.cost,
        )

    async def _translated(self, work: Coroutine[Any, Any, T]) -> T:
        """What it raises is a KVLinkerError."""
        try:
            return await work
        except asyncio.CancelledError:
            raise _closed() from None
        except Exception as error:
            raise self._error_of(error) from error

    async def _cancel_all(self) -> None:
        self._chunks.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _error_of(self, error: BaseException) -> KVLinkerError:
        """What a request ends with."""
        if isinstance(error, KVLinkerError):
            return error
        if not self.healthy:
            return EngineClosedError("vLLM's engine has stopped; see its log. Restart the server.")
        if isinstance(error, ValueError):
            return InvalidRequestError(f"vLLM refuses this request: {error}")
        logger.error("A request failed in vLLM.", exc_info=error)
        return KVLinkerError(f"vLLM failed on this request: {type(error).__name__}.")

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise _closed()


@dataclass(frozen=True, slots=True)
class _Handle:
    """``RequestHandle``."""

    cancel: Callable[[], None]


def salt_of(order: LinkOrder, tenant: str) -> str:
    """What vLLM's prefix cache keeps a request's KV apart by: whose it is, and how it came about."""
    return hashlib.sha256(f"{tenant}\0{order.model_dump_json()}".encode()).hexdigest()


def _closed() -> EngineClosedError:
    return EngineClosedError("The engine is shutting down. Send the request again to a running server.")
