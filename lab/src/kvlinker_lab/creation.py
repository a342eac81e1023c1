"""Measures the time to compute a chunk's KV, with and without its attention scores."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import Engine
from kvlinker.quality.bench.harness.benchmark import ChunkTokens, Repeat, Setup, benchmark
from kvlinker.quality.bench.harness.measurement import TENANT, in_turn, seconds_of
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent

COLUMNS = ("scores", "chunk_tokens", "ms", "ratio")


@benchmark("creation")
def creation(setup: Setup, *, chunk_tokens: ChunkTokens = 512, repeat: Repeat = 9) -> Report:
    """Measure the time to compute a chunk, with and without the attention scores that some policies
    use."""
    subject = setup.subject(repeat=repeat)
    return run_creation(subject, chunk_tokens=chunk_tokens, repeat=repeat, progress=setup.progress)


def run_creation(
    subject: MeasuredModel, *, chunk_tokens: int, repeat: int, progress: Progress = silent
) -> Report:
    """Compute chunks of random tokens, in turn on two engines that differ in nothing else; rows are
    medians."""
    generator = np.random.default_rng(0)

    def computation(engine: Engine) -> Callable[[], object]:
        def compute() -> object:
            tokens = generator.integers(
                0, subject.loaded.model.config.vocab_size, chunk_tokens
            ).tolist()
            return engine.cache_chunk(Chunk(tuple(tokens)), tenant=TENANT).result()

        return compute

    with ExitStack() as stack:
        engines = {
            scores: stack.enter_context(
                subject.llm(
                    kv_slots=2 * chunk_tokens,
                    max_step_tokens=chunk_tokens,
                    disk_space=0,
                    chunk_scores=scores,
                )
            ).engine
            for scores in (False, True)
        }
        taken = in_turn(
            {scores: seconds_of(computation(engine)) for scores, engine in engines.items()},
            repeat=repeat,
            what=lambda scores: f"{'with' if scores else 'without'} scores",
            progress=progress,
        )
    medians = {scores: statistics.median(seconds) for scores, seconds in taken.items()}
    rows: list[Row] = [
        {
            "scores": "with" if scores else "without",
            "chunk_tokens": chunk_tokens,
            "ms": 1e3 * median,
            "ratio": median / medians[False],
        }
        for scores, median in medians.items()
    ]
    return replace(subject.report(rows), columns=COLUMNS)
