"""kvlinker's ``Engine`` over vLLM: the server, the Python interface and the benchmarks run on it
unchanged."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import EngineClosedError, InvalidRequestError, KVLinkerError
from kvlinker.base.events import Events
from kvlinker.base.types.answers import PromptLogprobs
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import (
    EngineLoad,
    GenerationRequest,
    RequestHandle,
    RequestLimits,
    Sink,
    check_room,
    check_supported,
    engine_closed,
)
from kvlinker.engines.contract.places import PlaceBuilder
from kvlinker.engines.contract.sensitivity import UNRELATED_TEXT
from kvlinker.linking import parse_policy
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.policy import Policy
from kvlinker.settings import Settings
from kvlinker.store import ChunkKV, ChunkStore
from kvlinker_vllm.frontend.choices import ChoiceOutput, VLLMRequest
from kvlinker_vllm.frontend.chunk_provider import ChunkProvider
from kvlinker_vllm.frontend.client import SPARE_TOKENS, VLLMClient
from kvlinker_vllm.frontend.linker import PreparedPrompt, StoredLink, VLLMLinker
from kvlinker_vllm.frontend.model_facts import ModelFacts
from kvlinker_vllm.protocol.transfer_plan import outcome_of, unsupported

T = TypeVar("T")

logger = logging.getLogger("kvlinker.vllm.frontend.engine")

CLOSE_SECONDS = 30.0
"""The longest wait for requests to be cancelled at the end, in seconds. Chosen by hand."""

IDLE_POLL_SECONDS = 0.1
"""The seconds between two looks whether any request is running."""


class VLLMEngine:
    """An ``Engine`` over one of vLLM's engine clients; see ``kvlinker.engines.contract.contract``
    for the contract."""

    def __init__(
        self,
        client: VLLMClient,
        facts: ModelFacts,
        *,
        store: ChunkStore,
        events: Events,
        settings: Settings,
    ) -> None:
        self.fingerprint = facts.fingerprint
        self.parameters = 0
        self.kv_bytes_per_token = facts.kv_bytes_per_token
        self.computes_steps = "by vLLM"
        self.max_model_len = client.max_model_len
        self.client = client
        """The client of vLLM's engine."""

        self._facts = facts
        self._store = store
        self._events = events
        self._max_running = settings.max_running
        self._max_waiting = settings.max_waiting
        self._limits = RequestLimits(
            facts.vocabulary, self.max_model_len, settings.max_answer_tokens
        )
        longest = self.max_model_len - SPARE_TOKENS
        unrelated = facts.tokenizer.encode(UNRELATED_TEXT, add_special_tokens=False)
        self._chunks = ChunkProvider(
            client,
            store,
            fingerprint=facts.fingerprint,
            token_bytes=facts.kv_bytes_per_token,
            longest=longest,
            unrelated=unrelated if settings.chunk_scores else (),
        )
        usual = parse_policy(settings.usual_policy)
        self._expects_places = usual.needs.places and unsupported(usual) is None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-places")
        self._places = PlaceBuilder(
            store,
            self._compute_row,
            self._background.submit,
            fingerprint=facts.fingerprint,
            kv_bytes=self.kv_bytes,
            longest=longest,
        )
        self._linker = VLLMLinker(client, self._chunks, layers=len(facts.layers), longest=longest)
        self._closing = False
        self._admitting = threading.Lock()
        self._requests: dict[str, VLLMRequest] = {}  # guarded by _admitting
        self._tasks: dict[str, asyncio.Task[None]] = {}  # the loop's
        atexit.register(self.close)

    @property
    def healthy(self) -> bool:
        return not self._closing and self.client.healthy

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.kv_bytes_per_token

    def unsupported(self, policy: Policy) -> str | None:
        return unsupported(policy)

    def cache_chunk(self, chunk: Chunk, *, tenant: str, idle: bool = False) -> Future[int]:
        self._refuse_if_closing()
        self._limits.check_vocabulary(
            np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64), param="chunks"
        )
        return self.client.run(self._translate_errors(self._chunks.cache(chunk, tenant)))

    def expect_together(self, chunks: Sequence[Chunk], *, tenant: str) -> None:
        if self._expects_places:
            self._places.offer(chunks, tenant)

    def settle(self) -> Future[None]:
        return self._places.settle()

    def generate(self, request: GenerationRequest, sink: Sink) -> RequestHandle:
        max_tokens = self._check(request)
        made = VLLMRequest(
            request,
            sink,
            tokenizer=self._facts.tokenizer,
            max_tokens=max_tokens,
            events=self._events,
            is_complete=self.client.grammars.is_complete,
        )
        name = f"kvlinker-{secrets.token_hex(8)}"
        with self._admitting:  # what is sent to the loop here is before all that closing sends
            self._refuse_if_closing()
            queued = sum(other.open_choices for other in self._requests.values())
            check_room(queued, request.n, most=self._max_running + self._max_waiting)
            self._requests[name] = made
            self.client.loop.call_soon_threadsafe(self._start, name, made)
        return RequestHandle(partial(self._cancel, name))

    def expect_again(self, request: GenerationRequest, seconds: float) -> None:
        """Do nothing: prefixes are vLLM's own."""

    def explain(self, request: GenerationRequest) -> Future[Explanation]:
        self._check(request)
        return self.client.run(self._translate_errors(self._explain(request)))

    def prepare(self, request: GenerationRequest) -> Future[PreparedPrompt]:
        """Link the prompt of a request that vLLM's own handlers are to answer.

        Where there are several choices, the prompt's KV is in vLLM's prefix cache then, so that it
        is linked once. Raises PolicyError, ContextLengthError or EngineClosedError at once; later
        errors are the future's.
        """
        self._check(request)
        return self.client.run(self._translate_errors(self._prepare(request)))

    def note_uses(
        self, prepared: PreparedPrompt, tenant: str, params: Mapping[str, Any] | None
    ) -> None:
        """Note in the store how a prepared prompt used its chunks, and the report on workers'
        memory in the ``kv_transfer_params`` of vLLM's answer."""
        self.client.note(outcome_of(params))
        self.client.threads.submit(self._tell_store, prepared.linked, tenant)

    def score(self, request: GenerationRequest) -> Future[PromptLogprobs]:
        raise _scoring_error("prompt")

    def score_whole(
        self, tokens: NDArray[np.int64], *, first: int, top: int, tenant: str
    ) -> Future[PromptLogprobs]:
        """See the contract. vLLM has no requests that give way: it is sent once no request is
        running, and computed together with those that arrive later."""
        self._refuse_if_closing()
        self._limits.check_whole(tokens, first)
        return self.client.run(
            self._translate_errors(
                self._score_whole(tokens, first, min(top, self._facts.vocabulary))
            )
        )

    def current_load(self) -> EngineLoad:
        """Return the requests under way and their tokens so far, as counted here: vLLM's own
        figures are in its process."""
        with self._admitting:
            requests = list(self._requests.values())
        choices = sum(request.open_choices for request in requests)
        running = min(choices, self._max_running)
        used = sum(request.tokens for request in requests)
        slots = self.client.slots
        return EngineLoad(running, choices - running, min(used, slots), slots)

    def resident_keys(self) -> frozenset[str]:
        return self.client.memory.keys()

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return None: vLLM does not report how long it computes."""
        return None

    def forget_prefixes(self) -> None:
        """Empty vLLM's prefix cache once all requests have ended, so that the next one computes
        everything; benchmarks do so."""
        self.client.run(self.client.forget_prefixes()).result()

    def close(self) -> None:
        with self._admitting:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self.close)
        try:
            if self.client.loop.is_running():
                self.client.run(self._cancel_all()).result(timeout=CLOSE_SECONDS)
        finally:
            self.client.close()
            self._background.shutdown()

    def _check(self, request: GenerationRequest) -> int:
        """Check a request, and return the most tokens that its answers may have.

        Raises EngineClosedError, PolicyError and InvalidRequestError.
        """
        self._refuse_if_closing()
        check_supported(self.unsupported(request.policy))
        _refuse_unsupported(request)
        if request.sampling.grammar is not None:
            self.client.grammars.prepare(request.sampling.grammar)
        return self._limits.max_tokens(request)

    def _start(self, name: str, request: VLLMRequest) -> None:
        task = self.client.loop.create_task(self._serve(name, request))
        self._tasks[name] = task
        task.add_done_callback(partial(self._forget_request, name, request))

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all requests with it
            self.client.loop.call_soon_threadsafe(self._cancel_task, name)

    def _cancel_task(self, name: str) -> None:
        if name in self._tasks:
            self._tasks[name].cancel()

    async def _serve(self, name: str, request: VLLMRequest) -> None:
        """Link the prompt and generate all choices. The first one is linked; the others begin with
        its first token, and find the linked KV in vLLM's prefix cache."""
        linked = await self._linker.link(request.request)
        request.clock.loaded = time.perf_counter()
        linked = await self._linker.refine(linked)
        request.mark_planned(linked)
        first, *others = request.choices
        prefilled = asyncio.Event()
        streams = [self._generate(name, request, linked, first, prefilled.set)]
        streams += [
            self._generate(f"{name}-{choice.index}", request, linked, choice, after=prefilled)
            for choice in others
        ]
        await asyncio.gather(*streams, self._note_uses(linked, request, after=prefilled))

    async def _generate(
        self,
        name: str,
        request: VLLMRequest,
        linked: StoredLink,
        choice: ChoiceOutput,
        began: Callable[[], object] = lambda: None,
        after: asyncio.Event | None = None,
    ) -> None:
        """Generate one choice, once ``after`` is set; errors end this one alone. ``began`` is
        called with its first token, or when it has none."""
        try:
            if after is not None:
                await after.wait()
            linked_before = after is not None and request.choices[0].tokens > 0
            outputs = self.client.stream(
                name,
                linked.plan.prompt.tokens.tolist(),
                request.request.sampling_of(choice.index),
                max_tokens=request.max_tokens,
                transfer=linked.transfer_again if linked_before else linked.transfer,
                salt=linked.salt(request.request.sharer),
            )
            async with contextlib.aclosing(outputs):
                async for new in outputs:
                    choice.accept(new)
                    began()
                    if choice.ended:
                        break
        except Exception as error:
            choice.fail(self._error_of(error))
        finally:
            began()

    async def _note_uses(
        self, linked: StoredLink, request: VLLMRequest, *, after: asyncio.Event
    ) -> None:
        """Note in the store how the prompt used its chunks, unless it failed."""
        await after.wait()
        if request.choices[0].tokens:
            await self.client.in_thread(self._tell_store, linked, request.request.tenant)

    def _tell_store(self, linked: StoredLink, tenant: str) -> None:
        if linked.link.policy.needs.places:
            self._places.offer(linked.link.prompt.chunks, tenant)
        for use in linked.uses():
            self._store.note_use(self._chunks.key(use.chunk, tenant), use.recomputed)

    def _forget_request(self, name: str, request: VLLMRequest, done: asyncio.Task[None]) -> None:
        """Forget a request that has ended, however it ended."""
        del self._tasks[name]
        with self._admitting:
            del self._requests[name]
        if not done.cancelled():
            error = done.exception()
            if error is not None:
                request.fail(self._error_of(error))
        elif self._closing:
            request.fail(engine_closed())
        request.cancel()

    async def _prepare(self, request: GenerationRequest) -> PreparedPrompt:
        linked = await self._linker.refine(await self._linker.link(request))
        transfer, tokens = linked.transfer, linked.plan.prompt.tokens.tolist()
        salt = linked.salt(request.sharer)
        outcome = None
        if request.n > 1:
            outcome = await self.client.run_prompt(tokens, transfer, salt)
            transfer = linked.transfer_again
        return PreparedPrompt(linked, self.client.sign(transfer, tokens), salt, outcome)

    async def _explain(self, request: GenerationRequest) -> Explanation:
        linked = await self._linker.refine(await self._linker.link(request), explains=True)
        return linked.explanation(self._facts.cost)

    async def _score_whole(self, tokens: NDArray[np.int64], first: int, top: int) -> PromptLogprobs:
        await self._wait_until_idle()
        return await self.client.prompt_logprobs(tokens, first=first, top=top)

    def _compute_row(self, chunks: Sequence[Chunk], tenant: str) -> Future[tuple[ChunkKV, ...]]:
        """Compute a row of chunks; as in ``score_whole``, once no request is running."""
        self._refuse_if_closing()
        return self.client.run(self._translate_errors(self._row(chunks)))

    async def _row(self, chunks: Sequence[Chunk]) -> tuple[ChunkKV, ...]:
        await self._wait_until_idle()
        return await self._chunks.compute_row(chunks)

    async def _wait_until_idle(self) -> None:
        """Wait until no request is running. Raises EngineClosedError."""
        while self.current_load().running:
            await asyncio.sleep(IDLE_POLL_SECONDS)
            self._refuse_if_closing()

    async def _translate_errors(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, and raise every error as a KVLinkerError. Work that its caller cancels
        ends without an error."""
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.healthy and task is not None and task.cancelling():
                raise
            raise engine_closed() from None
        except Exception as error:
            raise self._error_of(error) from error

    async def _cancel_all(self) -> None:
        self._chunks.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _error_of(self, error: BaseException) -> KVLinkerError:
        """Return the error that a request ends with."""
        from vllm.exceptions import VLLMClientError

        if isinstance(error, KVLinkerError):
            return error
        if not self.healthy:
            return EngineClosedError("vLLM's engine has stopped; see its log. Restart the server.")
        if isinstance(error, ValueError | VLLMClientError):
            return InvalidRequestError(f"vLLM refuses this request: {error}")
        logger.error("A request failed in vLLM.", exc_info=error)
        return KVLinkerError(f"vLLM failed on this request: {type(error).__name__}.")

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise engine_closed()


def _refuse_unsupported(request: GenerationRequest) -> None:
    """Raise InvalidRequestError for the first field that vLLM cannot follow."""
    if request.explains:
        raise InvalidRequestError(
            "The vllm engine does not explain a prompt with its answer: leave out"
            " 'link.explain'. Ask for the explanation alone, without an answer.",
            param="link.explain",
        )
    if request.keeps_answer:
        raise InvalidRequestError(
            "The vllm engine keeps no answers, whose KV stays in vLLM: leave out 'link.keep',"
            " and mark the answer where another prompt has it.",
            param="link.keep",
        )
    if request.sampling.prompt_logprobs is not None:
        raise _scoring_error("prompt_logprobs")
    if request.sampling.max_tokens == 0:
        raise InvalidRequestError(
            "max_tokens is 0, but the vllm engine generates at least 1 token.",
            param="max_tokens",
        )


def _scoring_error(param: str) -> InvalidRequestError:
    """Return the error of requests for log probabilities of prompts."""
    return InvalidRequestError(
        "The vllm engine cannot score prompts: vLLM gives log probabilities of prompts only if"
        " nothing is linked. Use the embedded engine.",
        param=param,
    )
