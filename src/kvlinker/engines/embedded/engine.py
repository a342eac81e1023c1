"""The embedded engine: one model in this process, put together from its parts."""

from __future__ import annotations

import atexit
import json
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import TypeVar, cast

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker.base.events import Events, PrefixRestored
from kvlinker.base.futures import completed, gather
from kvlinker.base.machine import available_memory
from kvlinker.base.threads import compute_serially
from kvlinker.base.types.answers import PromptLogprobs
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.contract import (
    STEP_TOKENS,
    EngineLoad,
    GenerationRequest,
    RequestHandle,
    RequestLimits,
    Sink,
    check_supported,
)
from kvlinker.engines.contract.elsewhere import Elsewhere
from kvlinker.engines.contract.places import PlaceBuilder, row_text
from kvlinker.engines.embedded.chunks.builder import ChunkBuilder
from kvlinker.engines.embedded.chunks.prompt_loader import PromptLoader
from kvlinker.engines.embedded.chunks.variants import VariantBuilder, VariantLibrary
from kvlinker.engines.embedded.decoding.grammars import GrammarGuides
from kvlinker.engines.embedded.execution.capturing import RecordingRoom
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.kv_cache.spilling import PoolSpill
from kvlinker.engines.embedded.loop import EngineLoop, StepTime
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.capture import CaptureRequest, Reading
from kvlinker.engines.embedded.requests.generation import Generation, PromptRequest
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.engines.embedded.requests.scoring import Explaining, Scoring, WholeScoring
from kvlinker.engines.embedded.requests.sequence import SequenceSlots
from kvlinker.engines.embedded.scheduling.composition import LayeredPieces, StepComposer
from kvlinker.engines.embedded.scheduling.queues import Admission
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.engines.embedded.scheduling.throughput import ComputeThroughput, throughput_name
from kvlinker.engines.embedded.verdicts import surroundings
from kvlinker.linking import parse_policy
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.policy import Policy
from kvlinker.prompting.segments import Prompt
from kvlinker.settings import Settings
from kvlinker.store import ChunkKV, ChunkStore, Speeds
from kvlinker.store.memory.pinned import PinnedChunk
from kvlinker.store.memory.resident import Residence

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=PromptRequest)

POOL_SHARE = 0.25
"""The share of the available memory that the pool takes."""

POOL_WINDOWS = 16
"""The most context windows that the pool is made to hold."""

SLOT_MINIMUM = 1024
"""The fewest slots that a pool may have, unless the context window is shorter still."""

RECORDED_SHARE = 1 / 8
"""The most that answers which are being kept may take, as a share of the chunks' memory; it comes
beside that."""

CPU_STEP_TOKENS = 256
"""The most tokens of a step on CPUs by default: as many as native code computes. Steps of 512 take
6 to 10% more of the processors (SmolLM2-135M at 5,090 tokens, Qwen2.5-0.5B at 1,969, AVX-512), and
requests that come meanwhile wait twice as long."""

LEAVING_SECONDS = 5.0
"""The time that writing beginnings of prompts for the next process may take."""

LOADERS = 2
"""Threads that begin links and fetch chunks' KV. They never wait for other requests."""


def default_slots(loaded: LoadedModel, window: int, running: int) -> int:
    """Return the number of slots of the pool, for up to ``running`` requests of up to ``window``
    tokens, and as many states that are kept for later ones; where tokens have no KV, slots take no
    memory. Raises ModelLoadError when memory is too tight."""
    available = available_memory()
    if loaded.device.type == "cuda":
        available = torch.cuda.mem_get_info(loaded.device)[0]
    states = 2 * running * loaded.state_bytes
    most = POOL_WINDOWS * window
    room = max(0, int(available * POOL_SHARE) - states)
    affordable = min(room // max(1, loaded.kv_bytes_per_token), most)
    if affordable < min(window, SLOT_MINIMUM):
        beside = f" beside the states of {running} requests ({states / 2**30:.1f} GiB)"
        raise ModelLoadError(
            f"A quarter of the {available / 2**30:.1f} GiB of memory that is available holds the KV"
            f" of {affordable} tokens only{beside if states else ''}. Free memory, or set"
            f" kv_slots{' or max_running' if states else ''}."
        )
    return affordable


class EmbeddedEngine:
    """``Engine`` over one model in this process. See ``kvlinker.engines.contract.contract`` for the
    contract.

    A request is checked (``RequestLimits``) and enters the scheduler, which has its chunks' KV
    fetched in another thread (``PromptLoader``). Then the engine's thread (``EngineLoop``) computes
    it step by step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        store: ChunkStore,
        events: Events,
        settings: Settings,
        variants: VariantLibrary | None = None,
        speeds: Speeds | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """``variants`` keeps variants of chunks, None to keep none; ``speeds`` remembers how fast
        the model computes. ``elsewhere`` computes chunks for this engine, which closes it."""
        if settings.keep_answers != "off" and loaded.anatomy.recurrences:
            raise ModelLoadError(
                f"keep_answers is {settings.keep_answers}, but answers of models whose layers keep"
                " a state are not kept: leave keep_answers off for this model."
            )
        self.fingerprint = loaded.fingerprint
        self.parameters = loaded.parameters
        self.kv_bytes_per_token = loaded.kv_bytes_per_token
        self.computes_steps = loaded.computes_steps
        self._loaded = loaded
        self._store = store
        self._events = events
        self._elsewhere = elsewhere
        pins = PinnedChunk if loaded.device.type == "cuda" else None
        store.keep_resident_as(Residence(loaded.resident_form, pins))
        window = min(loaded.context_window, settings.max_model_len or loaded.context_window)
        slots = settings.kv_slots or default_slots(loaded, window, settings.max_running)
        longest = self.max_model_len = min(window, slots)
        self._limits = RequestLimits(loaded.vocabulary, longest, settings.max_answer_tokens)
        pool = KVPool(loaded.layers, slots, dtype=loaded.dtype, device=loaded.device)
        self.runner = Runner(
            loaded.model,
            loaded.anatomy,
            pool,
            native_attention=settings.native != "off",
            program=None if isinstance(loaded.program, str) else loaded.program,
        )
        """For benchmarks and tests while no request is under way."""

        on_host = loaded.device.type == "cpu"
        throughput = self._throughput = ComputeThroughput(
            loaded.cost, speeds, throughput_name(loaded), on_host=on_host
        )
        self._loaders = ThreadPoolExecutor(LOADERS, "kvlinker-load", compute_serially)
        self._grammars = GrammarGuides(loaded)
        self._recording = RecordingRoom(int(settings.host_memory * RECORDED_SHARE))
        self._background = ThreadPoolExecutor(1, "kvlinker-background", compute_serially)
        keeps_prefixes = settings.prefix_cache == "on"
        keeps_states = bool(loaded.anatomy.recurrences)
        prefixes = spill = None
        if keeps_prefixes and not keeps_states:
            computation = json.dumps([loaded.fingerprint, surroundings()], default=str).encode()
            prefixes = store.keep_prefixes(blake3(computation).hexdigest(16))
        if prefixes is not None:
            spill = PoolSpill(
                prefixes,
                pool,
                throughput.seconds,
                fingerprint=loaded.fingerprint,
                token_bytes=loaded.kv_bytes_per_token,
            )
        step_tokens = settings.max_step_tokens or (CPU_STEP_TOKENS if on_host else STEP_TOKENS)
        self.scheduler = Scheduler(
            SequenceSlots(
                slots,
                keeps_prefixes=keeps_prefixes,
                spill=spill,
                states=settings.max_running if keeps_states else None,
                is_finite=pool.is_finite,
            ),
            self._load,
            hold=lambda request: store.hold(request.chunk_bytes),
            is_resident=lambda request: all(map(store.is_resident, request.chunk_bytes)),
            admission=Admission(
                throughput.seconds, max_waiting=settings.max_waiting, slo_ttft=settings.slo_ttft
            ),
            composer=StepComposer(
                throughput,
                max_step_tokens=step_tokens,
                seconds_per_token=None if settings.slo_tpot is None else settings.slo_tpot / 1e3,
                pieces=LayeredPieces(
                    throughput,
                    self.runner.accepts_layers,
                    token_limit=min(self.runner.most_layered_tokens, step_tokens),
                ),
            ),
            max_running=settings.max_running,
        )
        self._chunks = ChunkBuilder(
            loaded,
            store,
            self.scheduler,
            longest=longest,
            with_scores=settings.chunk_scores and bool(loaded.layers),
        )
        usual = parse_policy(settings.usual_policy)
        self._expects_places = usual.needs.places and loaded.unsupported(usual) is None
        self._places = PlaceBuilder(
            store,
            self._compute_row,
            self._background.submit,
            fingerprint=loaded.fingerprint,
            kv_bytes=loaded.kv_bytes,
            longest=longest,
        )
        builder = None
        if variants is not None and loaded.layers:
            builder = VariantBuilder(
                loaded, variants, self.scheduler, self._background.submit, longest=longest
            )
        self._loader = PromptLoader(
            loaded,
            store,
            self.scheduler,
            self._chunks,
            throughput,
            variants=builder,
            prefixes=prefixes,
            elsewhere=elsewhere,
            restored=lambda tokens: events.publish(PrefixRestored(tokens)),
        )
        self._loop = EngineLoop(
            self.scheduler,
            self.runner,
            throughput,
            guides=self._grammars,
            idle=store.throttle.idle if on_host else None,
        )
        self._loop.start()
        atexit.register(
            self.close
        )  # a thread inside torch when the interpreter goes would abort the process

    @property
    def healthy(self) -> bool:
        return self._loop.healthy

    @property
    def step_times(self) -> deque[StepTime]:
        """How long the last steps took, for benchmarks and tests."""
        return self._loop.times

    def unsupported(self, policy: Policy) -> str | None:
        return self._loaded.unsupported(policy)

    def kv_bytes(self, tokens: int) -> int:
        return self._loaded.kv_bytes(tokens)

    def cache_chunk(self, chunk: Chunk, *, tenant: str, idle: bool = False) -> Future[int]:
        self._limits.check_vocabulary(
            np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64), param="chunks"
        )
        key = chunk_key(chunk, fingerprint=self.fingerprint, tenant=tenant)
        stored = self._store.nbytes(key)
        wants_scores = chunk.scored and self._chunks.collects_scores
        if stored is not None and not (wants_scores and self._store.lacks_scores(key)):
            return completed(stored)
        building = self._chunks.build(
            key, chunk, tenant=tenant, idle=idle, with_scores=wants_scores
        )
        return gather([building.kvs], lambda computed: computed[0][0].nbytes)

    def expect_together(self, chunks: Sequence[Chunk], *, tenant: str) -> None:
        if self._expects_places:
            self._places.offer(chunks, tenant)

    def settle(self) -> Future[None]:
        return self._places.settle()

    def cache_prompt(self, prompt: Prompt, *, tenant: str) -> Future[Prompt]:
        """Compute and store the KV of all chunks of ``prompt`` at their positions there, each
        behind the ones before it, with scores that tell how much attention they pay to one another.
        The result is the prompt with these variants for chunks.

        Raises ContextLengthError and EngineClosedError at once; later errors are the future's.
        """
        self._limits.check_vocabulary(prompt.tokens, param="prompt")
        known = prompt.with_chunks(prompt.variant(index) for index in range(len(prompt.chunks)))
        keys = self._loader.keys(known.chunks, tenant)
        return gather(
            [self._chunks.build_prompt(keys, known, tenant=tenant)] if keys else [], lambda _: known
        )

    def generate(self, request: GenerationRequest, sink: Sink) -> RequestHandle:
        if request.keeps_answer and self._loaded.anatomy.recurrences:
            raise InvalidRequestError(
                "Answers of models whose layers keep a state are not kept: leave out 'link.keep',"
                " and mark the answer where another prompt has it.",
                param="link.keep",
            )
        max_tokens = self._limits.max_tokens(request)
        grammar = request.sampling.grammar
        generation = Generation(
            request,
            sink,
            loaded=self._loaded,
            max_tokens=max_tokens,
            events=self._events,
            linked=self._note_use,
            cancel=self.scheduler.cancel,
            room=self._recording,
            later=self._loop.outbox.put,
            head=None if request.sampling.prompt_logprobs is None else self.runner.head,
            guide=None if grammar is None else self._grammars.prepare(grammar),
        )
        self._enter(generation)
        return RequestHandle(partial(self.scheduler.cancel, generation.choices))

    def expect_again(self, request: GenerationRequest, seconds: float) -> None:
        keys = self._loader.keys(request.prompt.chunks, request.tenant)
        self.scheduler.expect_prefix(request.sharer, request.prompt, keys, request.policy, seconds)

    def explain(self, request: GenerationRequest) -> Future[Explanation]:
        self._limits.max_tokens(request)
        return self._enter(Explaining(request, self._loaded, cancel=self.scheduler.cancel)).future

    def score(self, request: GenerationRequest) -> Future[PromptLogprobs]:
        self._limits.check_scorable(request.prompt)
        scoring = Scoring(
            request,
            self._loaded,
            linked=self._note_use,
            head=self.runner.head,
            top=request.sampling.logprobs or 0,
        )
        return self._enter(scoring).future

    def score_whole(
        self, tokens: NDArray[np.int64], *, first: int, top: int, tenant: str
    ) -> Future[PromptLogprobs]:
        self._limits.check_whole(tokens, first)
        top = min(top, self._loaded.vocabulary)
        return self.scheduler.enter(
            WholeScoring(tokens, self.runner.head, first=first, top=top, tenant=tenant)
        ).future

    def current_load(self) -> EngineLoad:
        return self.scheduler.load()

    def resident_keys(self) -> frozenset[str]:
        return frozenset()

    def prefill_seconds(self, tokens: int) -> float | None:
        return self._throughput.prefill_seconds(tokens)

    def close(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._loop.close()
        if self._loop.sound:
            try:
                self.scheduler.leave_prefixes(LEAVING_SECONDS)
            except Exception:
                logger.exception("Beginnings of prompts end with this process.")
        self._grammars.close()
        self._loaders.shutdown()
        self._background.shutdown()
        atexit.unregister(self.close)

    def _load(self, request: Request) -> None:
        """Load the request's chunks in another thread. The scheduler calls this once the engine is
        put together, since the loader needs the scheduler."""
        self._loaders.submit(self._loader.load, cast(PromptRequest, request))

    def _enter(self, request: L) -> L:
        if self._loaded.anatomy.recurrences:
            check_supported(self.unsupported(request.request.policy))
        self._loader.name_chunks(request)
        return self.scheduler.enter(request)

    def _compute_row(self, chunks: Sequence[Chunk], tenant: str) -> Future[tuple[ChunkKV, ...]]:
        tokens, spans = row_text(chunks)
        reading = Reading(np.array(tokens, dtype=np.int64), spans[1:], keeps_states=False)
        request = CaptureRequest(
            self._loaded,
            [reading],
            kind=ResultKind.BACKGROUND,
            keep=itemgetter(0),
            identity=None,
            tenant=tenant,
        )
        return self.scheduler.enter(request).future

    def _note_use(self, request: PromptRequest) -> None:
        assert request.link is not None
        if request.link.policy.needs.places and not request.explains:
            self._places.offer(request.request.prompt.chunks, request.tenant)
        self._background.submit(
            self._loader.note_use, request.request, request.link, request.refinement
        )
