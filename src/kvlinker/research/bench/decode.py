"""Measures the time per decoded token, alone and in a batch, beside transformers' own cached decoding."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from kvlinker.engine.contract import Engine, GenerationEvent
from kvlinker.prompt.segments import FreshSegment, Prompt
from kvlinker.research.bench.benchmark import Repeat, Setup, benchmark, counts
from kvlinker.research.bench.measurement import greedy_request, in_turn
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.research.progress import Progress, silent
from kvlinker.types.answers import Delta, Finished

if TYPE_CHECKING:
    from kvlinker.embedded.model.loading import LoadedModel

COLUMNS = ("case", "system", "ms_per_step", "ratio_to_kvlinker")

Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""Token ids, [requests, tokens]."""


@benchmark("decode")
def decode(
    setup: Setup,
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4",
    context_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of each request.")] = 512,
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    repeat: Repeat = 5,
) -> Report:
    """Measure the time per decoded token, beside transformers' own cached decoding."""
    sizes = counts(batches)
    subject = setup.subject(repeat=repeat, steps=steps)
    return run_decode(
        subject, sizes, context_tokens=context_tokens, steps=steps, repeat=repeat, progress=setup.progress
    )


def run_decode(
    subject: Subject,
    batches: Sequence[int],
    *,
    context_tokens: int,
    steps: int,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Decode ``steps`` tokens for each batch size, both systems in turn, ``repeat`` times after one warm-up."""
    rows: list[Row] = []
    vocabulary = subject.loaded.model.config.vocab_size
    slots = max(batches) * (context_tokens + steps + 64)
    with subject.llm(kv_slots=slots) as llm:
        for batch in batches:
            case = f"{batch} × {context_tokens}"
            tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, context_tokens))
            systems: dict[str, Callable[[], float]] = {
                "kvlinker": partial(_ours, llm.engine, tokens, steps),
                "transformers": partial(_theirs, subject.loaded, tokens, steps),
            }
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


def _ours(engine: Engine, tokens: Tokens, steps: int) -> float:
    """Return the median seconds between steps in which every request of the batch got a token."""
    events: queue.SimpleQueue[tuple[float, GenerationEvent]] = queue.SimpleQueue()
    for row in tokens:
        request = greedy_request(Prompt((FreshSegment(tuple(row.tolist())),)), "full", max_tokens=steps)
        engine.generate(request, lambda _, event: events.put((time.perf_counter(), event)))
    finished = 0
    arrivals = []
    while finished < len(tokens):
        arrival, event = events.get()
        finished += isinstance(event, Finished)
        if isinstance(event, Delta):
            arrivals.append(arrival)
    # requests start one after another; in the last steps but one before the first ends, all of them decode
    together = arrivals[-len(tokens) * (steps // 2) :: len(tokens)]
    return float(np.median(np.diff(together)))


def _theirs(loaded: LoadedModel, tokens: Tokens, steps: int) -> float:
    """Return the median seconds of a step of transformers' greedy decoding, with its dynamic cache and SDPA."""
    import torch

    from kvlinker.embedded.model.interception import attention_of

    with torch.inference_mode(), attention_of(loaded.model, "sdpa"):
        ids = torch.from_numpy(tokens).to(loaded.device)
        output = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        times = [time.perf_counter()]
        for _ in range(steps - 1):
            chosen = output.logits[:, -1].argmax(-1, keepdim=True)
            output = loaded.model(
                input_ids=chosen, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1
            )
            chosen.tolist()
            times.append(time.perf_counter())
    return float(np.median(np.diff(times)))
