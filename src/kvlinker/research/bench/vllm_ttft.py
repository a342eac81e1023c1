"""Time to first token in vLLM: its own full prefill against linked prompts; and what a neighbour notices of it."""

from __future__ import annotations

import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvlinker.config import Settings, load_settings
from kvlinker.engine.contract import Failed, GenerationEvent, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.llm import LLM
from kvlinker.prompt.segments import Prompt
from kvlinker.research.bench.report import Row
from kvlinker.research.bench.subject import Subject
from kvlinker.research.bench.ttft import TENANT, Workload
from kvlinker.types.answers import Delta
from kvlinker.types.sampling import SamplingParams

T = TypeVar("T")

COLUMNS = (
    "policy",
    "engine",
    "context_tokens",
    "recomputed_tokens",
    "ttft_ms",
    "speedup",
    "idle_itl_ms",
    "itl_ms",
    "busy_ttft_ms",
)
SPARE_TOKENS = 1024
HOST_MEMORY = 8 << 30
NEIGHBOUR_TOKENS = 64
IDLE_TOKENS = 12
"""Of a neighbour that decodes alone, before a prompt is linked beside it."""


class _Gaps(NamedTuple):
    """Seconds between two tokens of a request that decodes: ``idle``, and ``beside`` a prompt that is prefilled or
    linked, until that prompt's own first token, which then takes ``ttft`` seconds."""

    idle: float
    beside: float
    ttft: float


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

    ``itl_ms`` is the mean time between two tokens of a neighbour until the prompt's own first token, ``busy_ttft_ms``
    how long that takes, ``idle_itl_ms`` the median of a neighbour that is alone. vLLM's prefix cache is off, for
    prompts are repeated.
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

            def tell(text: str, tokens: int = len(prompt)) -> None:
                progress(f"{tokens} tokens, {text}")

            seconds = _in_turn(policies, repeat, partial(_first_token, llm, prompt), tell)
            gaps = _in_turn(policies, repeat, partial(_neighbour, llm, prompt), lambda text: tell(f"{text}, not alone"))
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            rows += [_row(llm, workload, prompt, name, medians, gaps[name]) for name in policies]
    return rows


def _in_turn(
    policies: Sequence[str], repeat: int, measure: Callable[[str], T], progress: Callable[[str], None]
) -> dict[str, list[T]]:
    """``repeat`` measurements of every policy, after one that does not count."""
    found: dict[str, list[T]] = {name: [] for name in policies}
    for turn in range(repeat + 1):
        for name in policies:
            progress(f"turn {turn} of {repeat}: {name} (vllm)")
            measured = measure(name)
            if turn:
                found[name].append(measured)
    return found


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


def _row(
    llm: LLM, workload: Workload, prompt: Prompt, policy: str, medians: dict[str, float], gaps: Sequence[_Gaps]
) -> Row:
    cost = llm.engine.explain(GenerationRequest(prompt, parse_policy(policy), tenant=TENANT)).result().cost
    full = medians.get("full")
    idle, beside, busy_ttft = (statistics.median(values) for values in zip(*gaps, strict=True))
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
        "busy_ttft_ms": 1e3 * busy_ttft,
    }


def _first_token(llm: LLM, prompt: Prompt, policy: str) -> float:
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    begin = time.perf_counter()
    llm.engine.generate(_request(prompt, policy, 1), events.put)
    _next(events)
    seconds = time.perf_counter() - begin
    events.get()
    return seconds


def _neighbour(llm: LLM, prompt: Prompt, policy: str) -> _Gaps:
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
    return _Gaps(idle, seconds / max(during, 1), seconds)


def _request(prompt: Prompt, policy: str, tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(prompt, parse_policy(policy), sampling, TENANT)


def _next(events: queue.SimpleQueue[GenerationEvent]) -> None:
    event = events.get()
    if isinstance(event, Failed):
        raise event.error
