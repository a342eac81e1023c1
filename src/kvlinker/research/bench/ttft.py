"""Time to first token of one prompt made of cached chunks, policy by policy, and where that time goes."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from kvlinker.embedded.engine import EmbeddedEngine
from kvlinker.embedded.model.interception import attention_of
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.embedded.step import Profile
from kvlinker.engine.contract import Failed, GenerationEvent, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.prompt.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.research.bench.machine import copy_bandwidth, matmul_rate
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.types.answers import Finished
from kvlinker.types.chunks import Chunk
from kvlinker.types.sampling import SamplingParams

TENANT = "bench"
SPARE_SLOTS = 1024
STEP_TOKENS = 2048
PARTS = ("load", "place", "select", "attention", "matmul", "rest")
COLUMNS = (
    "policy",
    "engine",
    "context_tokens",
    "recomputed_tokens",
    "ttft_ms",
    "speedup",
    "floor_ms",
    *(f"{part}_ms" for part in PARTS),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A prompt of ``chunks`` cached chunks of ``chunk_tokens`` each, and ``fresh_tokens`` behind them."""

    chunks: int
    chunk_tokens: int
    fresh_tokens: int

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens + self.fresh_tokens

    def prompt(self, vocabulary: int, seed: int = 0) -> Prompt:
        generator = np.random.default_rng(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(generator.integers(0, vocabulary, count).tolist())

        cached = [CachedSegment(Chunk(tokens(self.chunk_tokens))) for _ in range(self.chunks)]
        return Prompt((*cached, FreshSegment(tokens(self.fresh_tokens))))


def run_ttft(
    subject: Subject,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    *,
    repeat: int,
    tier: str = "host",
    full_limit: int | None = None,
    with_transformers: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure every policy on every workload, in turn, ``repeat`` times after one warm-up; medians are reported.

    ``full`` is left out of prompts longer than ``full_limit``. transformers' own forward pass of the same prompt takes
    part whenever ``full`` does, unless ``with_transformers`` is false. ``progress`` is told what is measured next.
    """
    loaded = subject.loaded
    bandwidth = copy_bandwidth(loaded.device)
    rate = matmul_rate(loaded.dtype, loaded.device)
    rows: list[Row] = []
    longest = max(workload.tokens for workload in workloads)
    with subject.llm(kv_slots=longest + 2 * SPARE_SLOTS, tier=tier, max_step_tokens=STEP_TOKENS) as llm:
        engine = llm.engine
        assert isinstance(engine, EmbeddedEngine)
        for workload in workloads:
            prompt = workload.prompt(loaded.model.config.vocab_size)
            progress(f"{len(prompt)} tokens: caching {workload.chunks} chunks")
            for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
                future.result()
            llm.store.flush()
            with_full = full_limit is None or len(prompt) <= full_limit
            competitors = {
                ("embedded", name): policy_measurement(engine, loaded, prompt, name)
                for name in policies
                if with_full or name != "full"
            }
            if with_transformers and ("embedded", "full") in competitors:
                competitors["transformers", "full"] = _transformers_measurement(loaded, prompt)
            taken: dict[tuple[str, str], list[Measurement]] = {key: [] for key in competitors}
            for turn in range(repeat + 1):
                for key, measure in competitors.items():
                    progress(f"{len(prompt)} tokens, turn {turn} of {repeat}: {key[1]} ({key[0]})")
                    measurement = measure()
                    if turn:
                        taken[key].append(measurement)
            rows += _rows(
                engine,
                workload,
                prompt,
                taken,
                tier=tier,
                kv_bytes_per_token=loaded.kv_bytes_per_token,
                bandwidth=bandwidth,
                rate=rate,
            )
    return subject.report(rows, copy_gb_per_s=round(bandwidth / 1e9, 1), matmul_tflop_per_s=round(rate / 1e12, 3))


def scaling_exponents(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Per (policy, engine) the exponent b of the fit ttft = a · tokens^b, where there are three lengths or more."""
    lengths: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        lengths.setdefault((row["policy"], row["engine"]), []).append((row["context_tokens"], row["ttft_ms"]))
    return {
        key: statistics.linear_regression(*zip(*np.log(points).tolist(), strict=True)).slope
        for key, points in lengths.items()
        if len({length for length, _ in points}) >= 3
    }


def _rows(
    engine: EmbeddedEngine,
    workload: Workload,
    prompt: Prompt,
    taken: Mapping[tuple[str, str], Sequence[Measurement]],
    *,
    tier: str,
    kv_bytes_per_token: int,
    bandwidth: float,
    rate: float,
) -> list[Row]:
    """``floor_ms`` is what no implementation can beat: KV read and written once, all arithmetic at matmul speed."""
    medians = {key: statistics.median(m.ttft for m in measurements) for key, measurements in taken.items()}
    full = medians.get(("embedded", "full"))
    rows: list[Row] = []
    for (system, policy), measurements in taken.items():
        cost = engine.explain(GenerationRequest(prompt, parse_policy(policy), tenant=TENANT)).result().cost
        ttft = medians[system, policy]
        row = {
            "policy": policy,
            "engine": system,
            "context_tokens": len(prompt),
            "chunks": workload.chunks,
            "fresh_tokens": workload.fresh_tokens,
            "tier": tier,
            "ttft_ms": 1e3 * ttft,
            "speedup": None if full is None else full / ttft,
            "recomputed_tokens": cost.recomputed_tokens,
            "floor_ms": 1e3 * (2 * cost.cached_tokens * kv_bytes_per_token / bandwidth + cost.flops / rate),
        }
        for part in PARTS if system == "embedded" else ():
            row[f"{part}_ms"] = 1e3 * statistics.median(m.parts.get(part, 0.0) for m in measurements)
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds: to the first token, and of the parts that make it up."""

    ttft: float
    parts: dict[str, float]


def policy_measurement(
    engine: EmbeddedEngine, loaded: LoadedModel, prompt: Prompt, policy: str
) -> Callable[[], Measurement]:
    """What takes one measurement of the prompt's time to first token; the engine must be idle otherwise."""
    request = GenerationRequest(prompt, parse_policy(policy), SamplingParams(temperature=0, max_tokens=1), TENANT)

    def measure() -> Measurement:
        events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
        profile = Profile()
        engine.runner.profile = profile
        handles = _time_linears(loaded.model, profile)
        begin = time.perf_counter()
        engine.generate(request, events.put)
        first = events.get()
        ttft = time.perf_counter() - begin
        for handle in handles:
            handle.remove()
        engine.runner.profile = None
        if isinstance(first, Failed):
            raise first.error
        finished = events.get()
        assert isinstance(finished, Finished), finished
        parts = dict(profile.seconds) | {"load": finished.timing.load}
        parts["rest"] = ttft - sum(parts.values())
        return Measurement(ttft, parts)

    return measure


def _transformers_measurement(loaded: LoadedModel, prompt: Prompt) -> Callable[[], Measurement]:
    """transformers' own forward pass of the whole prompt, with its SDPA attention and a KV cache kept."""
    ids = torch.from_numpy(prompt.tokens)[None].to(loaded.device)

    @torch.inference_mode()
    def measure() -> Measurement:
        with attention_of(loaded.model, "sdpa"):
            begin = time.perf_counter()
            output = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
            output.logits.argmax().item()
            return Measurement(time.perf_counter() - begin, {})

    return measure


def _time_linears(model: nn.Module, profile: Profile) -> list[Any]:
    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def after(*_: Any) -> None:
        profile.seconds["matmul"] += time.perf_counter() - began

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [m.register_forward_pre_hook(before) for m in linears] + [m.register_forward_hook(after) for m in linears]
