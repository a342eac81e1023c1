"""Time to first token of one prompt made of cached chunks, policy by policy, and where that time goes."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from kvlinker.bench.machine import copy_bandwidth, describe_machine, matmul_rate, versions
from kvlinker.bench.report import Report, Row
from kvlinker.chunks import Chunk
from kvlinker.engine.base import Failed, Finished, GenerationEvent, GenerationRequest, SamplingParams
from kvlinker.engine.embedded import EmbeddedEngine
from kvlinker.engine.interception import attention_of
from kvlinker.engine.loading import LoadedModel
from kvlinker.engine.profile import Profile
from kvlinker.linking import LinkPlan, make_plan, parse_policy
from kvlinker.prompt.segments import CachedSegment, FreshSegment, Prompt

TENANT = "bench"
COLUMNS = (
    "policy",
    "engine",
    "context_tokens",
    "recomputed_tokens",
    "ttft_ms",
    "speedup",
    "floor_ms",
    "load_ms",
    "place_ms",
    "attention_ms",
    "matmul_ms",
    "rest_ms",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A prompt of ``chunks`` cached chunks of ``chunk_tokens`` each, and ``fresh_tokens`` behind them."""

    chunks: int
    chunk_tokens: int
    fresh_tokens: int

    def prompt(self, vocabulary: int, seed: int = 0) -> Prompt:
        generator = np.random.default_rng(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(generator.integers(0, vocabulary, count).tolist())

        cached = [CachedSegment(Chunk(tokens(self.chunk_tokens))) for _ in range(self.chunks)]
        return Prompt((*cached, FreshSegment(tokens(self.fresh_tokens))))


def run_ttft(
    loaded: LoadedModel,
    engine: EmbeddedEngine,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    *,
    repeat: int,
    command: str,
    settings: dict[str, Any],
    tier: str = "host",
    with_transformers: bool = True,
    before_each: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> Report:
    """Measure every policy on every workload, in turn, ``repeat`` times after one warm-up; medians are reported.

    ``before_each`` runs before every measurement (to empty caches); ``progress`` after.
    """
    bandwidth = copy_bandwidth(loaded.device)
    rate = matmul_rate(loaded.dtype, loaded.device)
    rows: list[Row] = []
    for workload in workloads:
        prompt = workload.prompt(loaded.model.config.vocab_size)
        for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
            future.result()
        competitors: dict[tuple[str, str], Callable[[], _Measurement]] = {
            ("embedded", name): _policy_measurement(engine, loaded, prompt, name) for name in policies
        }
        if with_transformers:
            competitors["transformers", "full"] = _transformers_measurement(loaded, prompt)
        taken: dict[tuple[str, str], list[_Measurement]] = {key: [] for key in competitors}
        for turn in range(repeat + 1):
            for key, measure in competitors.items():
                before_each()
                measurement = measure()
                progress()
                if turn:
                    taken[key].append(measurement)
        full = _median([m.ttft for m in taken["embedded", "full"]]) if ("embedded", "full") in taken else None
        for (name, policy), measurements in taken.items():
            plan = make_plan(prompt, parse_policy(policy))
            ttft = _median([m.ttft for m in measurements])
            parts = {
                part: 1e3 * _median([m.parts.get(part, 0.0) for m in measurements])
                for part in ("load", "place", "attention", "matmul", "rest")
            }
            rows.append(
                {
                    "policy": policy,
                    "engine": name,
                    "context_tokens": len(prompt),
                    "chunks": workload.chunks,
                    "fresh_tokens": workload.fresh_tokens,
                    "tier": tier,
                    "ttft_ms": 1e3 * ttft,
                    "speedup": None if full is None else full / ttft,
                    "recomputed_tokens": plan.recomputed_tokens,
                    "floor_ms": 1e3 * _floor(loaded, plan, bandwidth, rate),
                    **{f"{part}_ms": value for part, value in parts.items()},
                }
            )
    machine = describe_machine(loaded.device) | {
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "matmul_tflop_per_s": round(rate / 1e12, 3),
    }
    return Report(command, machine, versions(), settings, rows)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Seconds: to the first token, and of the parts that make it up."""

    ttft: float
    parts: dict[str, float]


def _policy_measurement(
    engine: EmbeddedEngine, loaded: LoadedModel, prompt: Prompt, policy: str
) -> Callable[[], _Measurement]:
    request = GenerationRequest(prompt, parse_policy(policy), SamplingParams(temperature=0, max_tokens=1), TENANT)

    def measure() -> _Measurement:
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
        return _Measurement(ttft, parts)

    return measure


def _transformers_measurement(loaded: LoadedModel, prompt: Prompt) -> Callable[[], _Measurement]:
    """transformers' own forward pass of the whole prompt, with its SDPA attention and a KV cache kept."""
    ids = torch.from_numpy(prompt.tokens)[None].to(loaded.device)

    @torch.inference_mode()
    def measure() -> _Measurement:
        with attention_of(loaded.model, "sdpa"):
            begin = time.perf_counter()
            output = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
            output.logits.argmax().item()
            return _Measurement(time.perf_counter() - begin, {})

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


def _floor(loaded: LoadedModel, plan: LinkPlan, bandwidth: float, rate: float) -> float:
    """Seconds that no implementation can beat here: KV read and written once, and the arithmetic at matmul speed.

    Per computed token 2 operations per weight outside the embedding, and 4 · heads · head_dim per layer and key seen.
    """
    placed = sum(p.last - p.first for p in plan.placements) * loaded.kv_bytes_per_token
    weights: int = sum(p.numel() for n, p in loaded.model.named_parameters() if "embed" not in n and "lm_head" not in n)
    computed = sum(end - begin for begin, end in plan.runs)
    seen = sum((begin + end + 1) * (end - begin) / 2 for begin, end in plan.runs)
    per_key = sum(2 * layer.query_heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers)
    return 2 * placed / bandwidth + (2 * weights * computed + per_key * seen) / rate


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
