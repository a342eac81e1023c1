"""Measures the time per token of a request that decodes while a long prompt is computed beside
it."""

from __future__ import annotations

import queue
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, counts
from kvlinker.quality.bench.harness.measurement import Workload, first_token, greedy_request
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent

if TYPE_CHECKING:
    from kvlinker.llm import LLM

COLUMNS = (
    "prompt_tokens",
    "idle_ms",
    "beside_p50_ms",
    "beside_p99_ms",
    "worst_ms",
    "worst_ratio",
    "prefill_s",
)
NEIGHBOUR_TOKENS = 64
"""The tokens of the neighbour's prompt."""

IDLE_TOKENS = 24
"""The tokens that the neighbour decodes alone before each prompt."""

WARM_UP_TOKENS = 512
"""The prompt that is computed first, alone, so that the engine knows how long prompts take."""


@benchmark("neighbour", settings=("slo_tpot",))
def neighbour(
    setup: Setup,
    *,
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of the prompts, with commas between.")
    ] = "4096,16384",
    most_tokens: Annotated[
        int,
        typer.Option(
            min=2,
            help="Tokens of the neighbour to measure beside a prompt, which is then cancelled.",
        ),
    ] = 100_000,
) -> Report:
    """Measure the time per token of a request that decodes while a long prompt is computed in full
    beside it.

    How long a step may take is the setting --slo-tpot, in milliseconds.
    """
    lengths = counts(prompt_tokens)
    slo_tpot = setup.settings.slo_tpot
    subject = setup.subject(most_tokens=most_tokens, slo_tpot=slo_tpot)
    return run_neighbour(
        subject, lengths, most_tokens=most_tokens, slo_tpot=slo_tpot, progress=setup.progress
    )


def run_neighbour(
    subject: MeasuredModel,
    lengths: list[int],
    *,
    most_tokens: int,
    slo_tpot: float | None = None,
    progress: Progress = silent,
) -> Report:
    """Make a row per prompt length: the time between the neighbour's tokens, alone and beside the
    prompt."""
    rows: list[Row] = []
    with subject.llm(
        kv_slots=max(lengths) + subject.loaded.context_window, slo_tpot=slo_tpot
    ) as llm:
        for length in lengths:
            progress(f"a prompt of {length} tokens")
            rows.append(_row(llm, length, most_tokens))
    return replace(subject.report(rows), columns=COLUMNS)


def _raise_failure(event: GenerationEvent) -> None:
    if isinstance(event, Failed):
        raise event.error


def _row(llm: LLM, length: int, most_tokens: int) -> Row:
    """Let a neighbour decode alone, then beside a prompt of ``length`` tokens."""
    warm_up, own, prompt = (
        Workload(0, 1, tokens).prompt(256, seed=seed)
        for seed, tokens in enumerate((WARM_UP_TOKENS, NEIGHBOUR_TOKENS, length))
    )
    first_token(llm.engine, warm_up, "full")
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    tokens: queue.SimpleQueue[tuple[float, GenerationEvent]] = queue.SimpleQueue()
    room = llm.max_model_len - NEIGHBOUR_TOKENS

    def next_token() -> float:
        when, event = tokens.get()
        if isinstance(event, Finished):
            raise KVLinkerError(
                "The neighbour's answer ended before what is measured beside it: measure a shorter"
                " prompt, or fewer tokens by --most-tokens."
            )
        _raise_failure(event)
        return when

    decoding = llm.engine.generate(
        greedy_request(own, "full", max_tokens=room),
        lambda _, event: tokens.put((time.perf_counter(), event)),
    )
    try:
        alone = [next_token() for _ in range(IDLE_TOKENS)]
        begin = time.perf_counter()
        computing = llm.engine.generate(
            greedy_request(prompt, "full"), lambda _, event: events.put(event)
        )
        beside = [alone[-1]]
        try:
            while events.empty() and len(beside) <= most_tokens:
                beside.append(next_token())
            seconds = None if events.empty() else time.perf_counter() - begin
        finally:
            computing.cancel()
        if seconds is not None:
            _raise_failure(events.get())
    finally:
        decoding.cancel()
    idle = statistics.median(after - before for before, after in pairwise(alone[1:]))
    gaps = sorted(after - before for before, after in pairwise(beside))
    return {
        "prompt_tokens": length,
        "idle_ms": 1e3 * idle,
        "beside_p50_ms": 1e3 * statistics.median(gaps),
        "beside_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        "worst_ms": 1e3 * gaps[-1],
        "worst_ratio": gaps[-1] / idle,
        "prefill_s": seconds,
        "steps": len(gaps),
    }
