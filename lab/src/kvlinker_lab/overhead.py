"""Measures what HTTP adds to a request, beside the same request in Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.doors.client import Client
from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    Repeat,
    Setup,
    benchmark,
    policy_names,
)
from kvlinker.quality.bench.harness.measurement import Workload, in_turn, seconds_of
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.serving import serve_llm

if TYPE_CHECKING:
    from kvlinker.llm import LLM

COLUMNS = ("case", "ms", "over_python_ms")
_FRESH_TOKENS = 32
"""The tokens behind the chunks: the default of the benchmarks."""


@benchmark("overhead")
def overhead(
    setup: Setup,
    *,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[str, typer.Option(help="Linking policy.")] = "legolink-16",
    repeat: Repeat = 15,
) -> Report:
    """Measure what HTTP adds to a request, beside the same request in Python."""
    (name,) = policy_names(policy)
    subject = setup.subject(repeat=repeat)
    workload = Workload(chunks, chunk_tokens, _FRESH_TOKENS)
    return run_overhead(subject, workload, name, repeat=repeat, progress=setup.progress)


def run_overhead(
    subject: MeasuredModel,
    workload: Workload,
    policy: str,
    *,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Ask for one linked chat completion of one token, in Python and over HTTP in turn, ``repeat``
    times; medians."""
    with (
        subject.llm(kv_slots=2 * workload.tokens + 4096) as llm,
        serve_llm(llm) as url,
        Client(url) as client,
    ):
        texts = [
            f"{index:04d} " + "x" * (workload.chunk_tokens - 5) for index in range(workload.chunks)
        ]
        parts = [
            {"type": "context_cache", "id": cache.id} for cache in llm.generate_context_cache(texts)
        ]
        messages = [{"role": "user", "content": [*parts, "What do these have in common?"]}]

        def make_request(target: LLM | Client) -> Callable[[], object]:
            return lambda: target.chat_completion(
                messages, policy=policy, temperature=0, max_tokens=1
            )

        targets: dict[str, LLM | Client] = {"python": llm, "http": client}
        taken = in_turn(
            {case: seconds_of(make_request(target)) for case, target in targets.items()},
            repeat=repeat,
            progress=progress,
        )
    medians = {case: 1e3 * statistics.median(seconds) for case, seconds in taken.items()}
    rows: list[Row] = [
        {"case": case, "ms": median, "over_python_ms": median - medians["python"]}
        for case, median in medians.items()
    ]
    return replace(subject.report(rows), columns=COLUMNS)
