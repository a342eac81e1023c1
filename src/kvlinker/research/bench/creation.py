"""Time to compute a chunk's KV, with and without its attention scores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from kvlinker.engine.contract import Engine
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.types.chunks import Chunk

TENANT = "bench"
COLUMNS = ("scores", "chunk_tokens", "ms", "ratio")


def run_creation(
    subject: Subject, *, chunk_tokens: int, repeat: int, progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Chunks of random tokens, in turn on two engines that differ in nothing else; medians, after one warm-up."""
    generator = np.random.default_rng(0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        engines = {
            scores: stack.enter_context(
                subject.llm(kv_slots=2 * chunk_tokens, max_step_tokens=chunk_tokens, disk_space=0, chunk_scores=scores)
            ).engine
            for scores in seconds
        }
        for turn in range(repeat + 1):
            progress(f"turn {turn} of {repeat}")
            for scores, engine in engines.items():
                tokens = generator.integers(0, subject.loaded.model.config.vocab_size, chunk_tokens).tolist()
                elapsed = _time(engine, Chunk(tuple(tokens)))
                if turn:
                    seconds[scores].append(elapsed)
    medians = {scores: statistics.median(taken) for scores, taken in seconds.items()}
    rows: list[Row] = [
        {
            "scores": "with" if scores else "without",
            "chunk_tokens": chunk_tokens,
            "ms": 1e3 * median,
            "ratio": median / medians[False],
        }
        for scores, median in medians.items()
    ]
    return subject.report(rows)


def _time(engine: Engine, chunk: Chunk) -> float:
    begin = time.perf_counter()
    engine.cache_chunk(chunk, tenant=TENANT).result()
    return time.perf_counter() - begin
