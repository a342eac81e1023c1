"""Time to first token in vLLM: its own full prefill against linked prompts; and what a neighbour notices of it."""

from __future__ import annotations

import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from kvlinker.bench.report import Row
from kvlinker.bench.subject import Subject
from kvlinker.bench.ttft import TENANT, Workload
from kvlinker.config import Settings, load_settings
from kvlinker.engine.base import Delta, Failed, GenerationEvent, GenerationRequest, SamplingParams
from kvlinker.linking import parse_policy
from kvlinker.llm import LLM
from kvlinker.prompt.segments import Prompt

COLUMNS = (
    "policy",
    "engine",
    "context_tokens",
    "recomputed_tokens",
    "ttft_ms",
    "speedup",
    "idle_itl_ms",
    "itl_ms",
)
SPARE_TOKENS = 1024
HOST_MEMORY = 8 << 30
NEIGHBOUR_TOKENS = 64
IDLE_TOKENS = 12
"""Of a neighbour that decodes alone, before a prompt is linked beside it."""


def run_vllm_ttft(
    subject: Subject,
    settings: Settings,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    *,
    repeat: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """One row per workload and policy: medians of ``repeat`` measurements in turn, after one warm-up.

    ``itl_ms`` is the mean time between two tokens of a neighbour while the prompt is linked, ``idle_itl_ms`` the median
    of one that is alone. vLLM's prefix cache is off, for prompts are repeated.
    """
    longest = max(workload.tokens for workload in workloads)
    progress("starting vLLM")
    rows: list[Row] = []
    with _vllm(subject, settings, longest + SPARE_TOKENS) as llm:
        for workload in workloads:
            prompt = workload.prompt(subject.loaded.vocabulary)
            progress(f"{len(prompt)} tokens: caching {workload.chunks} chunks in vLLM")
            for future in [llm.engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
                future.result()
            taken: dict[str, list[float]] = {name: [] for name in policies}
            for turn in range(repeat + 1):
                for name in policies:
                    progress(f"{len(prompt)} tokens, turn {turn} of {repeat}: {name} (vllm)")
                    seconds = _first_token(llm, prompt, name)
                    if turn:
                        taken[name].append(seconds)
            medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
            for name in policies:
                progress(f"{len(prompt)} tokens: {name} beside a neighbour (vllm)")
                rows.append(_row(llm, workload, prompt, name, medians))
    return rows


@contextmanager
def _vllm(subject: Subject, settings: Settings, window: int) -> Iterator[LLM]:
    """The subject's weights, in an engine with a store of its own."""
    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as folder:
        model = Path(folder) / "model"
        subject.loaded.model.save_pretrained(model)
        subject.loaded.tokenizer.save_pretrained(model)
        own = load_settings(
            engine="vllm",
            model=str(model),
            dtype=str(subject.loaded.dtype).removeprefix("torch."),
            state_dir=Path(folder) / "state",
            host_memory=HOST_MEMORY,
            max_model_len=window,
            vllm_options={"enable_prefix_caching": False} | settings.vllm_options,
            redis_space=0,
            object_space=0,
        )
        with LLM.from_settings(own) as llm:
            yield llm


def _row(llm: LLM, workload: Workload, prompt: Prompt, policy: str, medians: dict[str, float]) -> Row:
    cost = llm.engine.explain(GenerationRequest(prompt, parse_policy(policy), tenant=TENANT)).result().cost
    full = medians.get("full")
    idle, beside = _neighbour(llm, prompt, policy)
    return {
        "policy": policy,
        "engine": "vllm",
        "context_tokens": len(prompt),
        "chunks": workload.chunks,
        "fresh_tokens": workload.fresh_tokens,
        "tier": "host",
        "ttft_ms": 1e3 * medians[policy],
        "speedup": None if full is None else full / medians[policy],
        "recomputed_tokens": cost.recomputed_tokens,
        "idle_itl_ms": 1e3 * idle,
        "itl_ms": 1e3 * beside,
    }


def _first_token(llm: LLM, prompt: Prompt, policy: str) -> float:
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    begin = time.perf_counter()
    llm.engine.generate(_request(prompt, policy, 1), events.put)
    _next(events)
    seconds = time.perf_counter() - begin
    events.get()
    return seconds


def _neighbour(llm: LLM, prompt: Prompt, policy: str) -> tuple[float, float]:
    """Seconds between two tokens of a request that decodes: alone, and while the prompt is prefilled or linked."""
    window = llm.max_model_len - NEIGHBOUR_TOKENS
    own = Workload(0, 1, NEIGHBOUR_TOKENS).prompt(256, seed=1)
    tokens: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    handle = llm.engine.generate(_request(own, "full", window), tokens.put)
    times = []
    for _ in range(IDLE_TOKENS):
        _next(tokens)
        times.append(time.perf_counter())
    idle = statistics.median(after - before for before, after in pairwise(times[1:]))
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    begin = time.perf_counter()
    while not tokens.empty():
        _next(tokens)
    llm.engine.generate(_request(prompt, policy, 1), events.put)
    _next(events)
    seconds = time.perf_counter() - begin
    during = tokens.qsize()
    handle.cancel()
    while isinstance(tokens.get(), Delta):
        pass
    events.get()
    return idle, seconds / max(during, 1)


def _request(prompt: Prompt, policy: str, tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(prompt, parse_policy(policy), sampling, TENANT)


def _next(events: queue.SimpleQueue[GenerationEvent]) -> None:
    event = events.get()
    if isinstance(event, Failed):
        raise event.error
