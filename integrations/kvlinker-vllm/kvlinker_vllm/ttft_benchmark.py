"""``kvlinker bench ttft-vllm``: the time to first token in vLLM, of its own full prefill and of
linked prompts, and the speed of a neighbour that decodes meanwhile."""

from __future__ import annotations

import gc
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import Delta
from kvlinker.engines.contract.contract import Failed, GenerationEvent
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.benchmark import (
    ChunkTokens,
    ComparedPolicies,
    FreshTokens,
    Repeat,
    Setup,
    benchmark,
    compared_policies,
    counts,
    supported_policies,
)
from kvlinker.quality.bench.harness.measurement import (
    FirstTokenAnswer,
    Workload,
    cache_chunks,
    chunk_files,
    drop_from_page_cache,
    first_token,
    greedy_request,
    in_turn,
)
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import UNMEASURED, MeasuredModel
from kvlinker.quality.bench.ttft import (
    ChunkCounts,
    ChunkTier,
    FullLimit,
    plot_ttft,
    run_ttft,
    with_growth,
)
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings, load_settings

if TYPE_CHECKING:
    from kvlinker.llm import LLM

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
"""The tokens of vLLM's window beyond the longest prompt, for a neighbour's answer."""

AGAIN, REORDERED = "full, again", "full, reordered"
"""The cases that are compared with ``full``: vLLM's prefix cache with the same prompt before it,
and with the same chunks in another order before it."""

HOST_MEMORY = 8 << 30
"""Bytes that the tier with the chunks has room for."""

WORKER_TIERS = ("host", "disk")
NEIGHBOUR_TOKENS = 64
"""The tokens of the neighbour's prompt."""

IDLE_TOKENS = 12
"""Tokens that a neighbour decodes alone, before a prompt is linked concurrently."""


class _Gaps(NamedTuple):
    """Holds seconds between two tokens of a neighbour: a request that decodes."""

    idle: float
    """While the neighbour is alone."""
    beside: float
    """While a prompt is prefilled or linked concurrently, until that prompt's own first token."""
    ttft: float
    """The seconds to that first token."""


@benchmark("ttft-vllm", plot=plot_ttft)
def ttft_vllm(
    setup: Setup,
    *,
    chunks: ChunkCounts = "8",
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: ComparedPolicies = None,
    tier: ChunkTier = "host",
    full_limit: FullLimit = None,
    repeat: Repeat = 5,
) -> Report:
    """Measure the time to first token of prompts made of cached chunks, by policy, in vLLM and in
    the embedded engine.

    A neighbour decodes beside each prompt in vLLM, and its time per token is measured.
    """
    workloads = [Workload(count, chunk_tokens, fresh_tokens) for count in counts(chunks)]
    named = compared_policies(policies, setup.settings)
    subject = setup.subject(repeat=repeat)
    if policies is None:
        named = supported_policies(named, subject.loaded)
    report = run_ttft(
        subject,
        workloads,
        named,
        repeat=repeat,
        tier=tier,
        full_limit=full_limit,
        with_transformers=False,
        progress=setup.progress,
    )
    rows = run_vllm_ttft(
        subject,
        setup.settings,
        workloads,
        named,
        repeat=repeat,
        tier=tier,
        progress=setup.progress,
    )
    return with_growth(replace(report, rows=[*report.rows, *rows], columns=COLUMNS))


def run_vllm_ttft(
    subject: MeasuredModel,
    settings: Settings,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    *,
    repeat: int,
    tier: str = "host",
    progress: Progress = silent,
) -> list[Row]:
    """Make one row per workload and policy: medians of ``repeat`` measurements in turn, after one
    warm-up.

    With the tier ``disk``, vLLM's workers keep no chunk in memory, and find the disk's page cache
    empty.

    ``full`` is compared with vLLM's own means without linking: its prefix cache. ``itl_ms`` is the
    mean time between two tokens of a neighbour until the prompt's own first token, ``busy_ttft_ms``
    how long that takes, ``idle_itl_ms`` the median of a neighbour that is alone. vLLM's prefix
    cache is emptied before each prompt, for they are repeated. Raises InvalidRequestError for other
    tiers than ``host`` and ``disk``.
    """
    if tier not in WORKER_TIERS:
        raise InvalidRequestError(
            f"vLLM's workers take chunks from {' or '.join(WORKER_TIERS)}, not from {tier!r}.",
            param="tier",
        )
    longest = max(workload.tokens for workload in workloads)
    progress("starting vLLM")
    rows: list[Row] = []
    with running_vllm(subject, settings, longest + SPARE_TOKENS, tier) as llm:
        for workload in workloads:
            prompt = workload.prompt(subject.loaded.vocabulary)
            progress(f"{len(prompt)} tokens: caching {workload.chunks} chunks in vLLM")
            cache_chunks(llm.engine, prompt)
            competitors = {name: partial(_alone, llm, prompt, name) for name in policies}
            if "full" in policies:
                competitors[AGAIN] = partial(_after, llm, prompt, prompt)
                competitors[REORDERED] = partial(_after, llm, _reordered(prompt), prompt)
            alone = in_turn(competitors, repeat=repeat, what="{} (vllm)".format, progress=progress)
            gaps = _gaps(llm, prompt, policies, repeat, progress)
            medians = {
                name: statistics.median(one.seconds for one in found)
                for name, found in alone.items()
            }
            recomputed = {name: _recomputed(llm, prompt, name) for name in policies}
            rows += [
                _row(
                    workload,
                    name,
                    medians,
                    tier=tier,
                    recomputed=recomputed.get(name),
                    gaps=gaps.get(name),
                )
                for name in competitors
            ]
    return rows


@contextmanager
def running_vllm(
    subject: MeasuredModel, settings: Settings, window: int, tier: str = "host"
) -> Iterator[LLM]:
    """Run the subject's weights in vLLM, with a store of its own whose chunks lie in the tier."""
    from kvlinker.llm import LLM

    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as folder:
        model = Path(folder) / "model"
        subject.loaded.model.save_pretrained(model)
        subject.loaded.tokenizer.save_pretrained(model)
        own = load_settings(
            engine="vllm",
            model=str(model),
            dtype=str(subject.loaded.dtype).removeprefix("torch."),
            state_dir=Path(folder) / "state",
            host_memory=HOST_MEMORY if tier == "host" else 0,
            max_model_len=window,
            vllm_options=settings.vllm_options,
            redis_url="",
            object_space=0,
        )
        with (
            _out_of_the_gpu(subject.loaded.model),
            LLM.from_settings(own.model_copy(update=UNMEASURED)) as llm,
        ):
            yield llm


@contextmanager
def _out_of_the_gpu(model: Any) -> Iterator[None]:
    """Keep a model in the host's memory for a while: vLLM takes nearly all of the GPU's."""
    import torch

    device = model.device
    if device.type == "cpu":
        yield
        return
    model.to("cpu")
    gc.collect()  # what engines have left, too
    torch.accelerator.empty_cache()
    try:
        yield
    finally:
        model.to(device)


def _row(
    workload: Workload,
    policy: str,
    medians: Mapping[str, float],
    *,
    tier: str,
    recomputed: int | None,
    gaps: Sequence[_Gaps] | None,
) -> Row:
    """Make the row of a case; ``recomputed`` and ``gaps`` are None if they were not measured."""
    full = medians.get("full")
    times: Row = dict.fromkeys(("idle_itl_ms", "itl_ms", "busy_ttft_ms"))
    if gaps is not None:
        times = dict(
            zip(
                times,
                (1e3 * statistics.median(values) for values in zip(*gaps, strict=True)),
                strict=True,
            )
        )
    return {
        "policy": policy,
        "engine": "vllm",
        "context_tokens": workload.tokens,
        "chunks": workload.chunks,
        "fresh_tokens": workload.fresh_tokens,
        "tier": tier,
        "ttft_ms": 1e3 * medians[policy],
        "speedup": None if full is None else full / medians[policy],
        "recomputed_tokens": recomputed,
        **times,
    }


def _recomputed(llm: LLM, prompt: Prompt, policy: str) -> int:
    """Count the prompt's cached tokens that the policy computes again."""
    return llm.engine.explain(greedy_request(prompt, policy)).result().cost.recomputed_tokens


def _reordered(prompt: Prompt) -> Prompt:
    """Return the prompt with its chunks in the opposite order."""
    *chunks, fresh = prompt.segments
    return Prompt((*reversed(chunks), fresh))


def _gaps(
    llm: LLM, prompt: Prompt, policies: Sequence[str], repeat: int, progress: Progress
) -> dict[str, list[_Gaps]]:
    """Measure a concurrent neighbour of the prompt, under each policy."""
    return in_turn(
        {name: partial(_neighbour, llm, prompt, name) for name in policies},
        repeat=repeat,
        what="{} (vllm), not alone".format,
        progress=progress,
    )


def _after(llm: LLM, before: Prompt, prompt: Prompt) -> FirstTokenAnswer:
    """Answer the prompt in full, with what vLLM's prefix cache holds after it answered ``before``
    in full."""
    _alone(llm, before, "full")
    return first_token(llm.engine, prompt, "full")


def _alone(llm: LLM, prompt: Prompt, policy: str) -> FirstTokenAnswer:
    """Answer the prompt without concurrent requests."""
    _forget(llm)
    return first_token(llm.engine, prompt, policy)


def _forget(llm: LLM) -> None:
    """Empty vLLM's prefix cache and, where chunks are read from the disk, its page cache."""
    engine: Any = llm.engine
    engine.forget_prefixes()
    if not llm.settings.host_memory:
        drop_from_page_cache(chunk_files(llm.settings.state_dir))


def _neighbour(llm: LLM, prompt: Prompt, policy: str) -> _Gaps:
    """Let a neighbour decode alone, then concurrently with the prompt."""
    _forget(llm)
    window = llm.max_model_len - NEIGHBOUR_TOKENS
    own = Workload(0, 1, NEIGHBOUR_TOKENS).prompt(256, seed=1)
    tokens: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    handle = llm.engine.generate(
        greedy_request(own, "full", max_tokens=window), lambda _, event: tokens.put(event)
    )
    times = []
    for _ in range(IDLE_TOKENS):
        _next(tokens)
        times.append(time.perf_counter())
    idle = statistics.median(after - before for before, after in pairwise(times[1:]))
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    begin = time.perf_counter()
    while not tokens.empty():
        _next(tokens)
    llm.engine.generate(greedy_request(prompt, policy), lambda _, event: events.put(event))
    _next(events)
    seconds = time.perf_counter() - begin
    during = tokens.qsize()
    handle.cancel()
    while isinstance(tokens.get(), Delta):
        pass
    events.get()
    return _Gaps(idle, seconds / max(during, 1), seconds)


def _next(events: queue.SimpleQueue[GenerationEvent]) -> None:
    """Wait for an event. Raises what the request failed with."""
    event = events.get()
    if isinstance(event, Failed):
        raise event.error
