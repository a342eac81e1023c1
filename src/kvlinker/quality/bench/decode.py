"""Measures the time per decoded token, alone and in a batch, by weight format, beside transformers'
own decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from kvlinker.base.threads import in_own_thread
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.benchmark import (
    ChunkTokens,
    Repeat,
    Setup,
    WeightFormats,
    benchmark,
    counts,
    names,
)
from kvlinker.quality.bench.harness.measurement import (
    START_TOKENS,
    Workload,
    cache_chunks,
    decode_step,
    in_turn,
    transformers_decode_step,
)
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent

COLUMNS = ("case", "system", "ms_per_step", "ratio")
FRESH_TOKENS = 32

Batches = Mapping[int, Sequence[Prompt]]
"""As many prompts as each batch has, by their number."""


@benchmark("decode")
def decode(
    setup: Setup,
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4,16",
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of each request, without --chunks.")
    ] = 512,
    chunks: Annotated[
        int,
        typer.Option(
            min=0, help="Cached chunks that all requests share, before 32 fresh tokens; 0: none."
        ),
    ] = 0,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[
        str | None, typer.Option(help="How chunks are linked; by default as requests are.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    formats: WeightFormats = "",
    repeat: Repeat = 5,
) -> Report:
    """Measure the time per decoded token, by weight format, beside transformers' own cached
    decoding.

    With --chunks, requests decode behind linked chunks that they share, and transformers takes no
    part.
    """
    sizes = counts(batches)
    workload = (
        Workload(chunks, chunk_tokens, FRESH_TOKENS) if chunks else Workload(0, 1, context_tokens)
    )
    linked_by = parse_policy(policy or setup.settings.policy).name if chunks else "full"
    subjects = setup.subjects(names(formats), repeat=repeat, steps=steps, policy=linked_by)
    plain = None if chunks else setup.transformer()
    return run_decode(
        subjects,
        sizes,
        workload,
        plain=plain,
        policy=linked_by,
        steps=steps,
        repeat=repeat,
        progress=setup.progress,
    )


def run_decode(
    subjects: Mapping[str, MeasuredModel],
    batches: Sequence[int],
    workload: Workload,
    *,
    plain: Any = None,
    policy: str = "full",
    steps: int,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Decode ``steps`` tokens for each batch size, all systems in turn, ``repeat`` times after one
    warm-up.

    ``subjects`` hold the model in the weight formats to compare; ratios are to the first. ``plain``
    is the model as transformers has it; None: transformers takes no part, as where there are
    chunks. Requests have the workload's chunks in common, linked by ``policy``. A system computes
    in a thread that ends with its turn: the OpenMP pools of two would slow both down.
    """
    first, *_ = subjects.values()
    prompts = {size: workload.prompts(first.loaded.vocabulary, size) for size in batches}
    systems: dict[str, Callable[[], dict[int, float]]] = {
        f"kvlinker {form}": partial(_in_kvlinker, subject, prompts, policy, steps)
        for form, subject in subjects.items()
    }
    if plain is not None:
        systems["transformers"] = partial(_in_transformers, plain, prompts, steps)
    taken = in_turn(systems, repeat=repeat, progress=progress)
    rows: list[Row] = []
    for size in batches:
        medians = {
            system: statistics.median(turn[size] for turn in turns)
            for system, turns in taken.items()
        }
        reference, *_ = medians.values()
        case = decode_case(size, workload)
        rows += [
            {
                "case": case,
                "system": system,
                "ms_per_step": 1e3 * median,
                "ratio": median / reference,
            }
            for system, median in medians.items()
        ]
    return replace(first.report(rows), columns=COLUMNS)


def decode_case(batch: int, workload: Workload) -> str:
    """Name what is decoded: requests, and what stands before them."""
    if workload.chunks:
        return (
            f"{batch} × {workload.chunks} × {workload.chunk_tokens} shared +"
            f" {workload.fresh_tokens}"
        )
    return f"{batch} × {workload.fresh_tokens}"


def _in_kvlinker(
    subject: MeasuredModel, prompts: Batches, policy: str, steps: int
) -> dict[int, float]:
    """Return the seconds of a step by batch size, from an engine that is started for it."""
    slots = max(size * (len(batch[0]) + steps + START_TOKENS) for size, batch in prompts.items())
    with subject.llm(kv_slots=slots) as llm:
        first, *_ = prompts.values()
        cache_chunks(llm.engine, first[0])
        return {
            size: decode_step(llm.engine, batch, policy, steps=steps)
            for size, batch in prompts.items()
        }


@in_own_thread
def _in_transformers(model: Any, prompts: Batches, steps: int) -> dict[int, float]:
    """Return the seconds of a step by batch size."""
    from kvlinker.engines.embedded.model.interception import attention_of

    with attention_of(model, "sdpa"):
        return {
            size: transformers_decode_step(
                model, np.stack([prompt.tokens for prompt in batch]), steps=steps
            )
            for size, batch in prompts.items()
        }
