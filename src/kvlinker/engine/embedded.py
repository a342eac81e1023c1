"""The embedded engine: one thread that steps through everybody's requests, and loaders that fetch their chunks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.chunks import Chunk, chunk_key
from kvlinker.config import Settings
from kvlinker.engine.base import EngineLoad, GenerationRequest, PromptLogprobs, Sink
from kvlinker.engine.chunk_builder import ChunkBuilder
from kvlinker.engine.cost import CostModel
from kvlinker.engine.explaining import Explaining
from kvlinker.engine.generation import Generation
from kvlinker.engine.link_loading import Link, LinkLoader
from kvlinker.engine.linked_request import LinkedRequest
from kvlinker.engine.loading import LoadedModel
from kvlinker.engine.observation import QuestionProbe
from kvlinker.engine.pace import Pace
from kvlinker.engine.pool import KVPool, SlotAllocator
from kvlinker.engine.refinement import Refinement
from kvlinker.engine.runner import Runner
from kvlinker.engine.scheduler import Scheduler, Step
from kvlinker.engine.scoring import Scoring
from kvlinker.engine.sequence import Sequence
from kvlinker.engine.sizing import default_slots
from kvlinker.engine.variant_builder import VariantBuilder
from kvlinker.engine.variant_library import VariantLibrary
from kvlinker.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    OverloadedError,
)
from kvlinker.events import Events
from kvlinker.futures import gather
from kvlinker.linking import LinkPlan
from kvlinker.linking.explanation import Explanation
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ChunkStore

logger = logging.getLogger(__name__)

LOADERS = 2
PREFETCHED = 8
"""Requests in the queue whose chunks' KV is held ready; those behind them fetch it later."""


class EmbeddedEngine:
    """``Engine`` over one model in this process. See ``kvlinker.engine.base`` for the contract."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        store: ChunkStore,
        events: Events,
        settings: Settings,
        variants: VariantLibrary | None = None,
    ) -> None:
        self.fingerprint = loaded.fingerprint
        self.kv_bytes_per_token = loaded.kv_bytes_per_token
        self._loaded = loaded
        self._store = store
        self._events = events
        self._cost = CostModel(loaded.model, loaded.layers)
        self._max_waiting = settings.max_waiting
        window = min(loaded.context_window, settings.max_model_len or loaded.context_window)
        slots = settings.kv_slots or default_slots(loaded, window)
        self.max_model_len = min(window, slots)
        pool = KVPool(loaded.layers, slots, dtype=loaded.dtype, device=loaded.device)
        self._runner = Runner(loaded.model, loaded.layers, pool, native_attention=settings.native_attention)
        self._allocator = SlotAllocator(slots)
        self._scheduler = Scheduler(
            self._allocator, pool.move, max_step_tokens=settings.max_step_tokens, max_running=settings.max_running
        )
        self._closing = False  # guarded by _wake
        self._generations: dict[Sequence, LinkedRequest] = {}  # the engine thread's
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # guarded by _wake
        self._loading: set[LinkedRequest] = set()  # requests whose chunks are to be fetched; guarded by _wake
        self._fetching = 0  # how many of them are; guarded by _wake
        self._chunks = ChunkBuilder(
            loaded,
            store,
            self._scheduler,
            longest=self.max_model_len,
            with_scores=settings.chunk_scores,
            command=self._command,
        )
        on_host = loaded.device.type == "cpu"
        self._pace = Pace(on_host=on_host)
        self._computing = store.pacing.computing if on_host else contextlib.nullcontext
        self._links = LinkLoader(loaded.fingerprint, store, self._chunks, variants, self._pace)
        self._variants = None if variants is None else VariantBuilder(loaded, variants, longest=self.max_model_len)
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="kvlinker-load")
        self._thread = threading.Thread(target=self._loop, name="kvlinker-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch when the interpreter goes would abort the process

    @property
    def healthy(self) -> bool:
        return not self._closing and self._thread.is_alive()

    @property
    def runner(self) -> Runner:
        """For benchmarks and tests, while no request is under way."""
        return self._runner

    @property
    def scheduler(self) -> Scheduler:
        """For tests, while no request is under way."""
        return self._scheduler

    def cache_chunk(self, chunk: Chunk, *, tenant: str) -> Future[int]:
        self._check_vocabulary(np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64), param="chunks")
        key = chunk_key(chunk, fingerprint=self.fingerprint, tenant=tenant)
        stored = self._store.nbytes(key)
        if stored is not None:
            known: Future[int] = Future()
            known.set_result(stored)
            return known
        return gather([self._chunks.build(key, chunk)], lambda computed: computed[0].nbytes)

    def cache_prompt(self, prompt: Prompt, *, tenant: str) -> Future[Prompt]:
        """Compute and store the KV of all chunks of ``prompt`` where they stand there, behind one another, with scores
        that tell how they look at one another. The result is the prompt with these variants for chunks.

        Raises ContextLengthError and EngineClosedError at once; later errors are the future's.
        """
        self._check_vocabulary(prompt.tokens, param="prompt")
        known = prompt.with_chunks(prompt.variant(index) for index in range(len(prompt.chunks)))
        keys = [chunk_key(chunk, fingerprint=self.fingerprint, tenant=tenant) for chunk in known.chunks]
        return gather([self._chunks.build_prompt(keys, known)] if keys else [], lambda _: known)

    def generate(self, request: GenerationRequest, sink: Sink) -> _Handle:
        self._check_vocabulary(request.prompt.tokens, param="prompt")
        max_tokens = self._checked_max_tokens(request)
        generation = Generation(request, sink, loaded=self._loaded, max_tokens=max_tokens, events=self._events)
        self._admit(generation)
        return _Handle(partial(self._cancel, generation))

    def explain(self, request: GenerationRequest) -> Future[Explanation]:
        self._check_vocabulary(request.prompt.tokens, param="prompt")
        self._checked_max_tokens(request)
        explaining = Explaining(request, layers=len(self._loaded.layers), cost=self._cost)
        self._admit(explaining)
        return explaining.future

    def score(self, request: GenerationRequest) -> Future[PromptLogprobs]:
        self._check_vocabulary(request.prompt.tokens, param="prompt")
        self._check_scorable(request.prompt)
        scoring = Scoring(request, head=self._runner.head, vocabulary=self._loaded.vocabulary)
        self._admit(scoring)
        return scoring.future

    def _admit(self, generation: LinkedRequest) -> None:
        with self._wake:
            self._refuse_if_closing()
            waiting = self._scheduler.waiting + len(self._loading)
            if waiting >= self._max_waiting:
                raise OverloadedError(f"{waiting} requests wait already; try again later.", retry_after=1)
            self._loading.add(generation)
            self._loaders.submit(self._load, generation)

    def load(self) -> EngineLoad:
        with self._wake:
            return EngineLoad(
                running=self._scheduler.running,
                waiting=self._scheduler.waiting + len(self._loading),
                slots_used=self._allocator.used,
                slots_total=self._allocator.slots,
            )

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        self._loaders.shutdown()
        atexit.unregister(self.close)

    def _checked_max_tokens(self, request: GenerationRequest) -> int:
        length = len(request.prompt)
        room = self.max_model_len - length
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {length} tokens, which leaves no room for an answer: prompt and answer together take "
                f"at most {self.max_model_len} tokens. Shorten the prompt.",
                param="messages",
            )
        wanted = request.sampling.max_tokens
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"The prompt has {length} tokens and max_tokens is {wanted}; together they exceed "
                f"{self.max_model_len}. Ask for at most {room} tokens or shorten the prompt.",
                param="max_tokens",
            )
        return room if wanted is None else wanted

    def _check_scorable(self, prompt: Prompt) -> None:
        fresh = len(prompt) - max((span.end for span in prompt.spans), default=0)
        if fresh < 2:
            raise InvalidRequestError(
                f"There is nothing to score: {fresh} tokens stand behind the last chunk, but at least 2 must. "
                "The first one is never scored.",
                param="prompt",
            )
        if len(prompt) > self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens, but the model takes {self.max_model_len}. Shorten the prompt.",
                param="prompt",
            )

    def _check_vocabulary(self, tokens: NDArray[np.int64], *, param: str) -> None:
        """An unknown id would fail all requests of its step."""
        vocabulary = self._loaded.vocabulary
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            bad = int(tokens[(tokens < 0) | (tokens >= vocabulary)][0])
            raise InvalidRequestError(
                f"Token id {bad} is not in the model's vocabulary: ids go from 0 to {vocabulary - 1}.", param=param
            )

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise EngineClosedError("The engine is shutting down. Send the request again to a running server.")

    def _command(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run ``command`` before its next step."""
        with self._wake:
            self._refuse_if_closing()
            self._commands.append(command)
            self._wake.notify_all()

    def _load(self, generation: LinkedRequest) -> None:
        """Runs in a loader: fetch the KV of the chunks to place, computing what the store lost, then queue."""
        try:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._scheduler.waiting + self._fetching < PREFETCHED)
                self._refuse_if_closing()
                if generation not in self._loading:
                    return  # cancelled
                self._fetching += 1
        except KVLinkerError as error:
            self._load_failed(generation, error)
            return
        again = generation.lost_before
        try:
            linked = self._links.link(generation.request, counts=not (generation.explains or again), at_hand=again)
            queued = gather([linked], lambda links: self._queue(generation, links[0]))
        except Exception as error:
            self._fetched(generation, error)
        else:
            queued.add_done_callback(lambda done: self._fetched(generation, done.exception()))

    def _fetched(self, generation: LinkedRequest, error: BaseException | None) -> None:
        with self._wake:
            self._fetching -= 1
            self._wake.notify_all()
        self._load_failed(generation, error)

    def _load_failed(self, generation: LinkedRequest, error: BaseException | None) -> None:
        if error is None or not self._loading_ends(generation):
            return
        if not isinstance(error, KVLinkerError):
            logger.error("Loading a request's chunks failed.", exc_info=error)
            error = KVLinkerError("The request's chunks could not be loaded; see the server's log.")
        generation.fail(error)

    def _offer_variants(self, variants: VariantBuilder, prompt: Prompt, tenant: str) -> None:
        """Runs in a loader: what this request missed may be there for the next one."""
        if variants.offer(prompt, tenant):
            with self._wake:
                self._wake.notify_all()

    def _queue(self, generation: LinkedRequest, link: Link) -> None:
        """All chunks' KV is there: hand the request to the engine's thread. What is raised here fails the request."""
        plan = link.plan
        probe = QuestionProbe(len(self._loaded.layers), plan.length) if plan.policy.probes else None
        sequence = Sequence(
            plan.prompt.tokens,
            plan.runs,
            placements=tuple(zip(plan.placements, link.kvs, strict=True)),
            most_tokens=plan.length + generation.max_tokens,
            probe=probe,
            refine=None if probe else self._refinement_of(plan, explains=generation.explains),
            logprobs=generation.collector(plan.prompt),
        )
        self._command(partial(self._enter, generation, link, sequence))
        if self._variants is not None and plan.policy.uses_variants and not generation.explains:
            self._loaders.submit(self._offer_variants, self._variants, plan.prompt, generation.request.tenant)

    def _refinement_of(self, plan: LinkPlan, *, explains: bool) -> Callable[[], Refinement] | None:
        if not plan.policy.refines:
            return None
        return partial(Refinement, plan, len(self._loaded.layers), explains=explains)

    def _enter(self, generation: LinkedRequest, link: Link, sequence: Sequence) -> None:
        if self._loading_ends(generation):
            generation.mark_loaded(link, sequence)
            self._generations[sequence] = generation
            self._scheduler.add(sequence)

    def _loading_ends(self, generation: LinkedRequest) -> bool:
        """Whether the caller is the one to go on with the request: it may have been cancelled meanwhile."""
        with self._wake:
            if generation not in self._loading:
                return False
            self._loading.remove(generation)
            return True

    def _cancel(self, generation: LinkedRequest) -> None:
        with contextlib.suppress(EngineClosedError):  # closing ends it anyway
            self._command(partial(self._drop_cancelled, generation))

    def _drop_cancelled(self, generation: LinkedRequest) -> None:
        if self._loading_ends(generation):
            generation.cancel()
        elif generation.sequence is not None and generation.sequence in self._generations:
            self._drop(generation.sequence)
            generation.cancel()

    def _load_again(self, sequence: Sequence) -> None:
        """A chunk's KV did not come after all."""
        generation = self._generations[sequence]
        self._drop(sequence)
        generation.mark_lost()
        with self._wake:
            self._loading.add(generation)
            self._loaders.submit(self._load, generation)

    def _drop(self, sequence: Sequence) -> None:
        del self._generations[sequence]
        self._scheduler.remove(sequence)

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            logger.exception("The engine failed; its requests are given up.")
        finally:
            with self._wake:
                self._closing = True
                self._wake.notify_all()
            self._fail_all(EngineClosedError("The engine was shut down."))

    def _turn(self) -> bool:
        """Run the commands that came, and a step if there is one; False when the engine closes."""
        with self._wake:
            self._wake.notify_all()  # loaders wait until the queue is short enough
            while not (self._commands or self._closing or self._variants_wait) and self._scheduler.idle:
                self._wake.wait()
            if self._closing:
                return False
        while (command := self._next_command()) is not None:
            command()
        if self._scheduler.idle and self._variants is not None:
            sequence = self._variants.start()
            if sequence is not None:
                self._scheduler.add(sequence)
        step = self._scheduler.schedule()
        if step is not None:
            self._run(step)
        return True

    @property
    def _variants_wait(self) -> bool:
        return self._variants is not None and self._variants.waiting

    def _next_command(self) -> Callable[[], None] | None:
        with self._wake:
            return self._commands.popleft() if self._commands else None

    def _run(self, step: Step) -> None:
        for sequence in step.sequences:
            if sequence in self._generations:
                self._generations[sequence].mark_started()
        begin = time.perf_counter()
        try:
            with self._computing():
                logits = self._runner.step(step.batch)
        except Exception as error:
            logger.exception("A step failed; its requests are given up.")
            for sequence in step.sequences:
                self._give_up(sequence, KVLinkerError(f"The model failed on this request: {type(error).__name__}."))
            return
        self._pace.note(len(step.batch.tokens), time.perf_counter() - begin)
        computed = [sequence for sequence in step.sequences if sequence.computed]
        rows = iter(logits)
        lost = [sequence for sequence in step.sequences if sequence.lost]
        for sequence in lost:
            self._load_again(sequence)
        self._give_up_failed_policies(step)
        for sequence in computed:
            if sequence.capture is not None:
                self._finish_capture(sequence)
            elif sequence.probe is not None:
                if sequence in self._generations:
                    self._relink(sequence, sequence.probe)
            else:
                row = next(rows)
                if sequence in self._generations:
                    self._advance(sequence, row)

    def _finish_capture(self, sequence: Sequence) -> None:
        if self._variants is not None and sequence in self._variants.under_way:
            self._scheduler.remove(sequence)
            self._loaders.submit(self._variants.finish(sequence))
        else:
            self._chunks.finish(sequence)

    def _relink(self, sequence: Sequence, probe: QuestionProbe) -> None:
        generation = self._generations[sequence]
        try:
            plan = generation.plan_after(probe)
        except Exception as error:
            self._give_up_policy(sequence, error)
            return
        sequence.relink(plan.runs, self._refinement_of(plan, explains=generation.explains))

    def _give_up_failed_policies(self, step: Step) -> None:
        for sequence in step.sequences:
            if (
                sequence in self._generations
                and sequence.refinement is not None
                and sequence.refinement.error is not None
            ):
                self._give_up_policy(sequence, sequence.refinement.error)

    def _give_up_policy(self, sequence: Sequence, error: Exception) -> None:
        name = self._generations[sequence].request.policy.name
        logger.error("Policy %s failed.", name, exc_info=error)
        self._give_up(sequence, KVLinkerError(f"Policy {name} failed: {error}"))

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        generation = self._generations[sequence]
        try:
            generation.accept(logits)
        except Exception as error:
            logger.exception("Sampling failed; the request is given up.")
            self._give_up(sequence, KVLinkerError(f"Sampling failed: {error}"))
            return
        if generation.ended or generation.cancelled:
            self._drop(sequence)
            generation.cancel()

    def _give_up(self, sequence: Sequence, error: KVLinkerError) -> None:
        if sequence in self._generations:
            generation = self._generations[sequence]
            self._drop(sequence)
            generation.fail(error)
        elif self._variants is not None and sequence in self._variants.under_way:
            self._scheduler.remove(sequence)
            self._variants.drop(sequence)
        else:
            self._chunks.fail(sequence, error)

    def _fail_all(self, error: KVLinkerError) -> None:
        while (command := self._next_command()) is not None:
            try:
                command()
            except Exception:
                logger.exception("A command failed while the engine closes.")
        variants = () if self._variants is None else self._variants.under_way
        for sequence in [*self._generations, *self._chunks.under_way, *variants]:
            self._give_up(sequence, error)
        with self._wake:
            loading = tuple(self._loading)
        for generation in loading:
            self._load_failed(generation, error)


@dataclass(frozen=True, slots=True)
class _Handle:
    """``RequestHandle`` of the embedded engine."""

    cancel: Callable[[], None]
