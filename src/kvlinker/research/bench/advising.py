"""Measures what advice on tiers needs: prefill of a few lengths, and what each configured tier delivers."""

from __future__ import annotations

import math
import queue
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvlinker.config import Settings
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.embedded.throughput import fitted, pace_name
from kvlinker.engine.contract import Engine, Failed, GenerationEvent, GenerationRequest
from kvlinker.errors import InvalidRequestError
from kvlinker.linking import Policy, parse_policy
from kvlinker.llm import LLM
from kvlinker.prompt.segments import FreshSegment, Prompt
from kvlinker.research.advice import TierFigures, figures_of
from kvlinker.research.bench.probing import Delivery, ProbeFailedError, ProbeStoppedError, measure_memory, measure_tier
from kvlinker.research.bench.subject import Subject
from kvlinker.research.bench.ttft import TENANT, Workload
from kvlinker.store import ChunkKV, LayerKV, Speeds, load_cipher
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.format.codecs import CODECS, RAW, Codec
from kvlinker.store.format.compression import MissingLibraryError
from kvlinker.store.loading.bandwidth import speed_values
from kvlinker.store.loading.speeds import FILE_NAME
from kvlinker.store.tiers.scratch import ScratchPlace, scratch_places
from kvlinker.types.answers import Finished
from kvlinker.types.chunks import Chunk, chunk_key
from kvlinker.types.sampling import SamplingParams

Progress = Callable[[str], None]

SAMPLE_TOKENS = 512
SAMPLES_BYTES = 256 << 20
"""Of all samples of a tier together, as computed, where its budget has room for them."""

_LEAST_TOKENS = 16
_SPARE_SLOTS = 1024
_FRESH_TOKENS = 32
_TOO_SMALL = "its budget, or the room that is left on it, is too small for samples"
_QUICK_SECONDS = 1.0
"""A prefill that is quicker is measured three times."""


@dataclass(frozen=True, slots=True)
class Measured:
    """``prefill``: seconds by length. ``percent`` is what the policy recomputes. ``failed``: tiers by name, with what
    happened. ``kept``: the speeds are in the state directory now."""

    prefill: Mapping[int, float]
    percent: float
    tiers: Sequence[TierFigures]
    failed: Mapping[str, str]
    kept: bool


def measure(
    subject: Subject,
    settings: Settings,
    policy: str,
    *,
    context_tokens: int,
    prices: Mapping[str, float],
    progress: Progress = lambda _: None,
) -> Measured:
    """Measure the subject's model, and the tiers that ``settings`` configure; what was measured is kept in their state
    directory. Nothing else stays.

    Raises InvalidRequestError for a context that is too long for the model, and StoreError.
    """
    loaded = subject.loaded
    if context_tokens >= loaded.context_window:
        raise InvalidRequestError(
            f"The context has {context_tokens} tokens, but the model takes {loaded.context_window} with the answer. "
            "Give fewer.",
            param="context_tokens",
        )
    places = scratch_places(settings, load_cipher(settings.encryption_key))
    with subject.llm(kv_slots=context_tokens + _SPARE_SLOTS, disk_space=0, device_memory=0) as llm:
        prefill = _measure_prefill(llm.engine, loaded, context_tokens, progress)
        percent = _percent_of(parse_policy(policy), llm.engine, loaded, context_tokens, progress)
        sample = _sample(llm, loaded, min(SAMPLE_TOKENS, context_tokens))
    per_token, per_pair = fitted(list(prefill.items()))
    prefill_seconds = per_token * context_tokens + per_pair * context_tokens * (context_tokens + 1) / 2
    sampled, failed = _measure_tiers(
        partial(_samples, sample, context_tokens), settings.host_memory, loaded.device, places, progress
    )
    tiers = [
        figures_of(
            tier,
            codec=one.codec.name,
            delivered=(one.delivery.nbytes, one.delivery.time),
            on_host=loaded.device.type == "cpu",
            bytes_per_token=one.bytes_per_token,
            smaller=one.smaller,
            context_tokens=context_tokens,
            prefill_seconds=prefill_seconds,
            percent=percent,
            price_per_gb=prices[tier],
        )
        for tier, one in sampled.items()
    ]
    measured = {pace_name(loaded): (per_token, per_pair)}
    for place in places:
        if place.tier in sampled:
            delivery = sampled[place.tier].delivery
            measured[place.speed_name] = speed_values(delivery.nbytes, delivery.time)
    return Measured(prefill, percent, tiers, failed, kept=_keep(settings, measured))


def _keep(settings: Settings, measured: Mapping[str, tuple[float, float]]) -> bool:
    speeds = Speeds(settings.state_dir / FILE_NAME)
    for name, values in measured.items():
        speeds.note(name, values)
    return speeds.save()


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a tier delivered of samples; ``others``: codecs that it could have."""

    samples: Sequence[ChunkKV]
    codec: Codec
    others: Sequence[Codec]
    delivery: Delivery

    @property
    def bytes_per_token(self) -> float:
        return self.delivery.nbytes / sum(_tokens(kv) for kv in self.samples)

    @property
    def smaller(self) -> dict[str, float]:
        """Bytes per token of the other codecs that take fewer."""
        found = {}
        for codec in self.others:
            with suppress(MissingLibraryError):
                size = _bytes_per_token(self.samples[0], codec)
                if size < self.bytes_per_token:
                    found[codec.name] = size
        return found


def _measure_tiers(
    samples_in: Callable[[int], list[ChunkKV]],
    host_bytes: int,
    device: torch.device,
    places: Sequence[ScratchPlace],
    progress: Progress,
) -> tuple[dict[str, _Sampled], dict[str, str]]:
    """By tier: what was measured, and what failed. ``samples_in`` makes samples of so many bytes at most."""
    sampled, failed = {}, {}
    if host_bytes:
        progress("host: copying samples")
        if samples := samples_in(host_bytes // 10):
            sampled["host"] = _Sampled(samples, RAW, (), measure_memory(samples, device))
        else:
            failed["host"] = _TOO_SMALL
    for place in places:
        if samples := samples_in(place.room_bytes):
            try:
                delivery = _probe(place, samples, progress)
            except (ProbeFailedError, OSError) as error:
                failed[place.tier] = str(error)
            else:
                sampled[place.tier] = _Sampled(samples, place.codec, tuple(CODECS.values()), delivery)
        else:
            failed[place.tier] = _TOO_SMALL
    return sampled, failed


def _bytes_per_token(kv: ChunkKV, codec: Codec) -> float:
    return encode_chunk("0" * 64, kv, codec).nbytes / _tokens(kv)


def _tokens(kv: ChunkKV) -> int:
    return kv.layers[0].key.shape[1]


def _measure_prefill(engine: Engine, loaded: LoadedModel, longest: int, progress: Progress) -> dict[int, float]:
    """Seconds of computing prompts of an eighth, half and all of the longest length, after a warm-up."""
    lengths = sorted({max(1, longest // 8), max(1, longest // 2), longest})
    progress(f"prefill of {lengths[0]} tokens: warming up")
    _prefill(engine, loaded, lengths[0])
    medians = {}
    for length in lengths:
        progress(f"prefill of {length} tokens")
        seconds = [_prefill(engine, loaded, length)]
        while len(seconds) < 3 and seconds[0] < _QUICK_SECONDS:
            seconds.append(_prefill(engine, loaded, length))
        medians[length] = statistics.median(seconds)
    return medians


def _prefill(engine: Engine, loaded: LoadedModel, length: int) -> float:
    """From the first step to the first token, in seconds."""
    tokens = np.random.default_rng(0).integers(0, loaded.vocabulary, length).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    request = GenerationRequest(Prompt((FreshSegment(tuple(tokens)),)), parse_policy("full"), sampling, TENANT)
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    engine.generate(request, events.put)
    while not isinstance(event := events.get(), Finished):
        if isinstance(event, Failed):
            raise event.error
    return event.timing.link


def _percent_of(policy: Policy, engine: Engine, loaded: LoadedModel, length: int, progress: Progress) -> float:
    """What the policy recomputes of a context's tokens: its own percentage, or what it does to random chunks."""
    own = getattr(policy, "percent", None)
    if isinstance(own, float):
        return own
    progress(f"what {policy.name} recomputes")
    cached = length - _FRESH_TOKENS if length > 2 * _FRESH_TOKENS else length
    chunks = max(2, round(cached / SAMPLE_TOKENS))
    workload = Workload(chunks, max(1, cached // chunks), _FRESH_TOKENS)
    cost = engine.explain(GenerationRequest(workload.prompt(loaded.vocabulary), policy, tenant=TENANT)).result().cost
    return 100 * cost.recomputed_tokens / (cost.cached_tokens + cost.recomputed_tokens)


def _sample(llm: LLM, loaded: LoadedModel, tokens: int) -> ChunkKV:
    """The KV that the model computes of random tokens: what compresses it knows no better."""
    generator = np.random.default_rng(1)
    chunk = Chunk(tuple(generator.integers(0, loaded.vocabulary, tokens).tolist()))
    llm.engine.cache_chunk(chunk, tenant=TENANT).result()
    kv = llm.store.get(chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant=TENANT))
    assert kv is not None, "the store's memory is large enough for a chunk"
    return kv


def _samples(sample: ChunkKV, context_tokens: int, room_bytes: int) -> list[ChunkKV]:
    """As many copies as make up the context, or as much of it as there is room for; none, if that is too little."""
    room_tokens = min(room_bytes, SAMPLES_BYTES) * _tokens(sample) // sample.nbytes
    tokens = min(_tokens(sample), room_tokens)
    if tokens < min(_LEAST_TOKENS, _tokens(sample)):
        return []
    count = min(math.ceil(context_tokens / tokens), room_tokens // tokens)
    return [
        ChunkKV(
            tuple(LayerKV(layer.key[:, :tokens].clone(), layer.value[:, :tokens].clone()) for layer in sample.layers)
        )
        for _ in range(count)
    ]


def _probe(place: ScratchPlace, samples: Sequence[ChunkKV], progress: Progress) -> Delivery:
    """In a thread: an interrupt of this one waits for the call to the tier that is under way, and for the samples to be
    removed."""
    begin, stop = threading.Event(), threading.Event()

    def told(number: int) -> None:
        progress(f"{place.tier}: {f'reading samples, round {number}' if number else 'writing samples'}")

    def run() -> Delivery:
        begin.wait()  # until this thread is known to whoever waits for it to end
        if stop.is_set():
            raise ProbeStoppedError
        opened: AbstractContextManager[Any] = place.open(2 * sum(kv.nbytes for kv in samples) + (1 << 20))
        with opened as tier:
            return measure_tier(tier, samples, stop, told)

    with ThreadPoolExecutor(1, thread_name_prefix="kvlinker-probe") as threads:
        try:
            probing = threads.submit(run)
            begin.set()
            return probing.result()
        except BaseException:
            stop.set()
            begin.set()
            raise
