"""Time per decoded token, alone and in a batch, beside transformers' own cached decoding."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvlinker.embedded.model.interception import attention_of
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.engine.contract import Engine, GenerationEvent, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.prompt.segments import FreshSegment, Prompt
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.types.answers import Delta, Finished
from kvlinker.types.sampling import SamplingParams

COLUMNS = ("case", "system", "ms_per_step", "ratio_to_kvlinker")


def run_decode(
    subject: Subject,
    batches: Sequence[int],
    *,
    context_tokens: int,
    steps: int,
    repeat: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Decode ``steps`` tokens for each batch size, both systems in turn, ``repeat`` times after one warm-up."""
    rows: list[Row] = []
    vocabulary = subject.loaded.model.config.vocab_size
    slots = max(batches) * (context_tokens + steps + 64)
    with subject.llm(kv_slots=slots) as llm:
        for batch in batches:
            tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, context_tokens))
            systems: dict[str, Callable[[], float]] = {
                "kvlinker": partial(_ours, llm.engine, tokens, steps),
                "transformers": partial(_theirs, subject.loaded, tokens, steps),
            }
            taken: dict[str, list[float]] = {name: [] for name in systems}
            for turn in range(repeat + 1):
                for name, measure in systems.items():
                    progress(f"{batch} × {context_tokens} tokens, turn {turn} of {repeat}: {name}")
                    seconds = measure()
                    if turn:
                        taken[name].append(seconds)
            ours = statistics.median(taken["kvlinker"])
            for name, seconds_per_step in taken.items():
                median = statistics.median(seconds_per_step)
                rows.append(
                    {
                        "case": f"{batch} × {context_tokens}",
                        "system": name,
                        "ms_per_step": 1e3 * median,
                        "ratio_to_kvlinker": median / ours,
                    }
                )
    return subject.report(rows)


def _ours(engine: Engine, tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]], steps: int) -> float:
    """Median seconds between steps in which every request of the batch got a token."""
    events: queue.SimpleQueue[tuple[float, GenerationEvent]] = queue.SimpleQueue()
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    for row in tokens:
        prompt = Prompt((FreshSegment(tuple(row.tolist())),))
        request = GenerationRequest(prompt, parse_policy("full"), params)
        engine.generate(request, lambda event: events.put((time.perf_counter(), event)))
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


@torch.inference_mode()
def _theirs(loaded: LoadedModel, tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]], steps: int) -> float:
    """Median seconds of a step of transformers' greedy decoding with its dynamic cache and SDPA attention."""
    with attention_of(loaded.model, "sdpa"):
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
