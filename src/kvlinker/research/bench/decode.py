"""Measures the time per decoded token, alone and in a batch, beside transformers' own cached decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from kvlinker.linking import parse_policy
from kvlinker.research.bench.benchmark import ChunkTokens, Repeat, Setup, benchmark, counts
from kvlinker.research.bench.measurement import (
    START_TOKENS,
    Tokens,
    Workload,
    cache_chunks,
    decode_step,
    in_turn,
    transformers_decode_step,
)
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.research.progress import Progress, silent

if TYPE_CHECKING:
    from kvlinker.embedded.model.loading import LoadedModel

COLUMNS = ("case", "system", "ms_per_step", "ratio_to_kvlinker")
FRESH_TOKENS = 32


@benchmark("decode")
def decode(
    setup: Setup,
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4,16",
    context_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of each request, without --chunks.")] = 512,
    chunks: Annotated[
        int,
        typer.Option(min=0, help="Cached chunks that all requests share, before 32 fresh tokens; 0: none."),
    ] = 0,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[str | None, typer.Option(help="How chunks are linked; by default as requests are.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    repeat: Repeat = 5,
) -> Report:
    """Measure the time per decoded token, beside transformers' own cached decoding.

    With --chunks, requests decode behind linked chunks that they share, and transformers takes no part.
    """
    sizes = counts(batches)
    workload = Workload(chunks, chunk_tokens, FRESH_TOKENS) if chunks else Workload(0, 1, context_tokens)
    linked_by = parse_policy(policy or setup.settings.policy).name if chunks else "full"
    subject = setup.subject(repeat=repeat, steps=steps, policy=linked_by)
    return run_decode(subject, sizes, workload, policy=linked_by, steps=steps, repeat=repeat, progress=setup.progress)


def run_decode(
    subject: Subject,
    batches: Sequence[int],
    workload: Workload,
    *,
    policy: str = "full",
    steps: int,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Decode ``steps`` tokens for each batch size, all systems in turn, ``repeat`` times after one warm-up.

    Requests have the workload's chunks in common, linked by ``policy``. transformers takes part where there are none.
    """
    rows: list[Row] = []
    vocabulary = subject.loaded.model.config.vocab_size
    slots = max(batches) * (workload.tokens + steps + START_TOKENS)
    with subject.llm(kv_slots=slots) as llm:
        for batch in batches:
            case = decode_case(batch, workload)
            prompts = workload.prompts(vocabulary, batch)
            cache_chunks(llm.engine, prompts[0])
            systems: dict[str, Callable[[], float]] = {
                "kvlinker": partial(decode_step, llm.engine, prompts, policy, steps=steps)
            }
            if not workload.chunks:
                tokens = np.stack([prompt.tokens for prompt in prompts])
                systems["transformers"] = partial(_transformers, subject.loaded, tokens, steps)
            taken = in_turn(
                systems,
                repeat=repeat,
                what=f"{case} tokens, {{}}".format,
                progress=progress,
            )
            medians = {system: statistics.median(seconds) for system, seconds in taken.items()}
            rows += [
                {
                    "case": case,
                    "system": system,
                    "ms_per_step": 1e3 * median,
                    "ratio_to_kvlinker": median / medians["kvlinker"],
                }
                for system, median in medians.items()
            ]
    return replace(subject.report(rows), columns=COLUMNS)


def decode_case(batch: int, workload: Workload) -> str:
    """Name what is decoded: requests, and what stands before them."""
    if workload.chunks:
        return f"{batch} × {workload.chunks} × {workload.chunk_tokens} shared + {workload.fresh_tokens}"
    return f"{batch} × {workload.fresh_tokens}"


def _transformers(loaded: LoadedModel, tokens: Tokens, steps: int) -> float:
    from kvlinker.embedded.model.interception import attention_of

    with attention_of(loaded.model, "sdpa"):
        return transformers_decode_step(loaded.model, tokens, steps=steps)
