"""Measures the figures for advice on tiers: the prefill of a context, and how fast each configured
tier delivers its KV.

Every figure is the median of several measurements, so that one that was disturbed does not count.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from secrets import token_hex

import numpy as np
import torch

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.events import Events
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.contract import Engine
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.linking import Policy, parse_policy
from kvlinker.llm import LLM
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.quality.bench.harness.measurement import (
    TENANT,
    Workload,
    cache_chunks,
    chunk_files,
    drop_from_page_cache,
    first_token,
    greedy_request,
)
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings
from kvlinker.store import ChunkKV, DiskTier, LayerKV, Tier, load_cipher
from kvlinker.store.loading.bandwidths import LoadTime
from kvlinker.store.tiers import ConfiguredTier, TierSetup, configured_tiers
from kvlinker_lab.advice.recommendation import TierFigures

ROUNDS = 3
"""Measurements of which the median counts."""

READERS = 2
"""Threads that read, as many as read a prompt's chunks."""

SAMPLE_TOKENS = 512
"""The most tokens of a sample: those of a chunk by default."""

SAMPLES_BYTES = 256 << 20
"""Bytes of all samples of a tier together, as computed, where its budget has room for them."""

_LEAST_TOKENS = 16
"""The fewest tokens of a sample. Shorter samples would measure the delay of a read alone. Chosen by
hand."""

_SPARE_SLOTS = 1024
"""The KV slots beyond those of the context, for other prompts of the measurement."""

_FRESH_TOKENS = 32
"""The tokens behind the chunks of a prompt whose recomputation is measured: those of a question."""


class ProbeFailedError(Exception):
    """Raised where a tier did not take the samples, or not give them back; the message says what
    happened."""


@dataclass(frozen=True, slots=True)
class TierAdvice:
    """The measurements that the advice is based on."""

    prefill_seconds: float
    """The time to compute the whole context."""
    percent: float
    """The percent of the context's tokens that the policy recomputes."""
    tiers: Sequence[TierFigures]
    failed: Mapping[str, str]
    """Tiers that could not be measured, with what happened."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of samples by a tier."""

    nbytes: int
    """Bytes of all samples, as stored."""
    tokens: int
    """Tokens of all samples."""
    time: LoadTime
    """The median time that reading them took."""


def advise(
    subject: MeasuredModel,
    settings: Settings,
    policy: str,
    *,
    context_tokens: int,
    prices: Mapping[str, float],
    progress: Progress = silent,
) -> TierAdvice:
    """Measure the subject's model, and the tiers that ``settings`` configure. Nothing that is
    written stays.

    Raises InvalidRequestError for a context that is too long for the model, and StoreError.
    """
    loaded = subject.loaded
    if context_tokens >= loaded.context_window:
        raise InvalidRequestError(
            f"The context has {context_tokens} tokens, but the model takes {loaded.context_window}"
            " with the answer. Give fewer.",
            param="context_tokens",
        )
    found = measurable_tiers(settings)
    measurable = [(tier, room) for tier, room in found if tier.name in prices]
    unpriced = {
        tier.name: f"its price is not known: give --price {tier.name}=NUMBER"
        for tier, _ in found
        if tier.name not in prices
    }
    with subject.llm(kv_slots=context_tokens + _SPARE_SLOTS, disk_space=0) as llm:
        prefill_seconds = measure_prefill(llm.engine, loaded.vocabulary, context_tokens, progress)
        percent = _percent_of(parse_policy(policy), llm.engine, loaded, context_tokens, progress)
        sample = _sample(llm, loaded, min(SAMPLE_TOKENS, context_tokens))
    deliveries, failed = _measure_tiers(
        sample, context_tokens, settings.host_memory, loaded.device, measurable, progress
    )
    codecs = {"host": "raw"} | {tier.name: tier.codec.name for tier, _ in measurable}
    tiers = [
        TierFigures(
            tier,
            codec=codecs[tier],
            bytes_per_token=found.nbytes / found.tokens,
            bytes_per_second=found.nbytes / found.time.seconds,
            busy_percent=100 * min(1.0, found.time.busy / found.time.seconds),
            overlaps=found.time.waits or loaded.device.type != "cpu",
            load_seconds=context_tokens * found.time.seconds / found.tokens,
            prefill_seconds=prefill_seconds,
            percent=percent,
            price_per_gb=prices[tier],
        )
        for tier, found in deliveries.items()
    ]
    return TierAdvice(prefill_seconds, percent, tiers, failed | unpriced)


def measurable_tiers(settings: Settings) -> list[tuple[ConfiguredTier, int]]:
    """Return the tiers but memory that the settings configure, and that have a place for samples,
    from the fastest to the slowest, each with the bytes that samples may take: a tenth of its
    budget in addition to it, and half of the free space of its medium.

    Raises StoreError for a place that cannot be used.
    """
    cipher = load_cipher(settings.encryption_key)
    setup = TierSetup(settings, Events(), host_bytes=0, cipher=cipher)
    return [(tier, _room_bytes(tier)) for tier in configured_tiers(setup) if tier.has_scratch]


def _room_bytes(tier: ConfiguredTier) -> int:
    free_bytes = tier.free_bytes()
    room_bytes = tier.budget_bytes // 10
    return room_bytes if free_bytes is None else min(room_bytes, free_bytes // 2)


def measure_prefill(
    engine: Engine, vocabulary: int, length: int, progress: Progress = silent
) -> float:
    """Return the seconds from the first step to the first token of a prompt of random tokens: the
    median of several, after a short prompt to warm up."""
    tokens = tuple(np.random.default_rng(0).integers(0, vocabulary, length).tolist())
    progress(f"prefill of {length} tokens: warming up")
    first_token(engine, Prompt((FreshSegment(tokens[: max(1, length // 8)]),)), "full")
    seconds = []
    for number in range(ROUNDS):
        progress(f"prefill of {length} tokens", number, ROUNDS)
        seconds.append(first_token(engine, Prompt((FreshSegment(tokens),)), "full").timing.link)
    return statistics.median(seconds)


def measure_tier(
    tier: Tier,
    samples: Sequence[ChunkKV],
    check: Callable[[], None] = lambda: None,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Delivery:
    """Write the samples, and read them back in several rounds; a disk's page cache is emptied of
    them before each.

    The caller removes them. ``check`` is called between the calls to the tier, and may raise.
    ``clock`` measures how long a round takes. Raises ProbeFailedError.
    """
    keys = [token_hex(32) for _ in samples]
    for number, (key, kv) in enumerate(zip(keys, samples, strict=True)):
        progress(f"{tier.name}: writing samples", number, len(samples))
        check()
        if not tier.put(key, kv):
            raise ProbeFailedError(
                "it did not take the samples: it is full, read-only, or does not answer"
            )
    nbytes = sum(tier.nbytes(key) or 0 for key in keys)
    times = []
    for number in range(ROUNDS):
        progress(f"{tier.name}: reading samples", number, ROUNDS)
        check()
        if isinstance(tier, DiskTier):
            drop_from_page_cache(chunk_files(tier.directory))
        times.append(_read(tier, keys, clock))
    return Delivery(nbytes, sum(kv.tokens for kv in samples), _median(times))


def measure_memory(samples: Sequence[ChunkKV], device: torch.device) -> Delivery:
    """Copy the samples from host memory to the ``device``, layer by layer, in several rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for layers in zip(*(kv.layers for kv in samples), strict=True):
            for layer in layers:
                layer.key.to(device, copy=True)
                layer.value.to(device, copy=True)
        for tensor in (each for kv in samples for state in kv.states for each in state.tensors):
            tensor.to(device, copy=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(LoadTime(time.perf_counter() - begin))
    return Delivery(
        sum(kv.nbytes for kv in samples), sum(kv.tokens for kv in samples), _median(times)
    )


def _read(tier: Tier, keys: Sequence[str], clock: Callable[[], float]) -> LoadTime:
    """Read all chunks, dealt out among several threads."""

    def read(share: Sequence[str]) -> float:
        """Return the seconds in which the thread kept a processor busy."""
        begin = time.thread_time()
        if any(tier.get(key) is None for key in share):
            raise ProbeFailedError("the samples were gone, or damaged, when they were to be read")
        return time.thread_time() - begin

    with ThreadPoolExecutor(READERS, thread_name_prefix="kvlinker-probe") as threads:
        begin = clock()
        busy = list(threads.map(read, [keys[first::READERS] for first in range(READERS)]))
        return LoadTime(clock() - begin, max(busy))


def _median(times: Sequence[LoadTime]) -> LoadTime:
    return sorted(times, key=lambda taken: taken.seconds)[len(times) // 2]


def _measure_tiers(
    sample: ChunkKV,
    context_tokens: int,
    host_bytes: int,
    device: torch.device,
    tiers: Sequence[tuple[ConfiguredTier, int]],
    progress: Progress,
) -> tuple[dict[str, Delivery], dict[str, str]]:
    """Return the measurements and the failures, by tier."""
    measured, failed = {}, {}
    rooms = ({"host": host_bytes // 10} if host_bytes else {}) | {
        tier.name: room for tier, room in tiers
    }
    by_name = {tier.name: tier for tier, _ in tiers}
    for name, room in rooms.items():
        samples = _samples(sample, context_tokens, room)
        if not samples:
            failed[name] = "its budget, or the room that is left on it, is too small for samples"
        elif name == "host":
            progress("host: copying samples")
            measured[name] = measure_memory(samples, device)
        else:
            budget = 2 * sum(kv.nbytes for kv in samples) + (1 << 20)
            try:
                with _signals_held() as check, by_name[name].scratch(budget) as opened:
                    measured[name] = measure_tier(opened, samples, check, progress)
            except (ProbeFailedError, OSError) as error:
                failed[name] = str(error)
    return measured, failed


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Hold back requests to end the process, so that samples are removed before; yield what obeys
    one that came."""
    came: list[int] = []

    def obey() -> None:
        if came:
            raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + came[0])

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield obey
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        obey()


def _percent_of(
    policy: Policy, engine: Engine, loaded: LoadedModel, length: int, progress: Progress
) -> float:
    """Return the percent of a context that the policy recomputes: its own percentage, or that of
    random chunks."""
    own = getattr(policy, "percent", None)
    if isinstance(own, float):
        return own
    progress(f"what {policy.name} recomputes")
    cached = length - _FRESH_TOKENS if length > 2 * _FRESH_TOKENS else length
    chunks = max(2, round(cached / SAMPLE_TOKENS))
    prompt = Workload(chunks, max(1, cached // chunks), _FRESH_TOKENS).prompt(loaded.vocabulary)
    cache_chunks(engine, prompt)  # what an explanation computes itself is no chunk's, but fresh
    cost = engine.explain(greedy_request(prompt, policy.name)).result().cost
    return 100 * cost.recomputed_tokens / (cost.cached_tokens + cost.recomputed_tokens)


def _sample(llm: LLM, loaded: LoadedModel, tokens: int) -> ChunkKV:
    """Compute the KV of random tokens: no compression knows it better than that of a text."""
    generator = np.random.default_rng(1)
    chunk = Chunk(tuple(generator.integers(0, loaded.vocabulary, tokens).tolist()))
    llm.engine.cache_chunk(chunk, tenant=TENANT).result()
    kv = llm.store.get_computed(chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant=TENANT))
    assert kv is not None, "the store's memory is large enough for a chunk"
    return kv


def _samples(sample: ChunkKV, context_tokens: int, room_bytes: int) -> list[ChunkKV]:
    """Copy the sample as often as makes up the context, or as there is room for; none, if that is
    too little. With states, which short chunks have as well, it is copied whole."""
    room_tokens = min(room_bytes, SAMPLES_BYTES) * sample.tokens // sample.nbytes
    tokens = min(sample.tokens, room_tokens)
    least = sample.tokens if sample.states else min(_LEAST_TOKENS, sample.tokens)
    if tokens < least:
        return []
    count = min(math.ceil(context_tokens / tokens), room_tokens // tokens)
    return [
        ChunkKV(
            tuple(
                LayerKV.of_parts([part[:, :tokens].clone() for part in layer.parts])
                for layer in sample.layers
            ),
            states=deepcopy(sample.states),
            tokens=tokens,
        )
        for _ in range(count)
    ]
