"""Measures what the library that routes requests takes itself: time and memory."""

from __future__ import annotations

import gc
import time
from typing import Annotated

import numpy as np
import psutil
import typer

from kvlinker.base.types.residency import MEMORY, KnownChunk, ResidencyReport
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker_fleet.naming import PromptOutline, WantedChunk
from kvlinker_fleet.router import Router

TOKENS = 512
"""The tokens of a chunk."""

SECONDS_PER_TOKEN = 17e-6
"""The reported seconds to compute a token."""

UNDER_WAY = 1000
"""The requests that are answered at a time."""


@benchmark("router", runs_model=False)
def router(
    setup: Setup,
    *,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 1000,
    resident: Annotated[int, typer.Option(min=1, help="Chunks in each one's memory.")] = 4000,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks per prompt.")] = 8,
    changes: Annotated[int, typer.Option(min=0, help="Changes in each report.")] = 50,
    decisions: Annotated[int, typer.Option(min=1, help="Decisions that are timed.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of chunks and prompts.")] = 0,
) -> Report:
    """Measure how many decisions and reports the router takes per second of one processor, and its
    memory.

    Chunks lie where chance puts them, of a corpus as large as all memory together; times are those
    of the processor, which other processes do not count to.
    """
    import torch

    return Report(
        command=setup.command,
        machine=describe_machine(torch.device("cpu")),
        versions=versions(),
        settings={"chunks": chunks, "changes": changes, "decisions": decisions},
        rows=[run_router(replicas, resident, chunks, changes, decisions, seed)],
    )


def run_router(
    replicas: int, resident: int, chunks: int, changes: int, decisions: int, seed: int
) -> Row:
    """Fill a router, and measure it."""
    random = np.random.default_rng(seed)
    corpus = replicas * resident
    gc.collect()
    before = psutil.Process().memory_info().rss
    measured = Router(seed=seed)
    for number in range(replicas):
        measured.add(str(number))
        measured.set_ready(str(number), True)
        _tell(measured, number, random.integers(corpus, size=resident).tolist(), whole=True)
    held = psutil.Process().memory_info().rss - before
    prompts = [
        PromptOutline(tuple(WantedChunk(_name(chunk), TOKENS) for chunk in wanted))
        for wanted in random.integers(corpus, size=(decisions, chunks)).tolist()
    ]
    began = time.process_time()
    taken = []
    for index, prompt in enumerate(prompts):
        decision = measured.choose(prompt, index / decisions)
        assert decision is not None
        taken.append(decision)
        if index >= UNDER_WAY:
            measured.note_first_byte(taken[index - UNDER_WAY], 0.1)
            measured.note_end(taken[index - UNDER_WAY])
    deciding = time.process_time() - began
    reports = [random.integers(corpus, size=changes).tolist() for _ in range(replicas)]
    began = time.process_time()
    for number, changed in enumerate(reports):
        _tell(measured, number, changed, whole=False)
    reporting = time.process_time() - began
    return {
        "replicas": replicas,
        "resident": resident,
        "decisions_per_s": decisions / deciding,
        "reports_per_s": replicas / reporting,
        "memory_mb": held / 1e6,
    }


def _tell(measured: Router, number: int, chunks: list[int], *, whole: bool) -> None:
    measured.report(
        str(number),
        ResidencyReport(
            "run",
            0,
            whole,
            {f"{chunk:064x}": KnownChunk((MEMORY,), (_name(chunk),)) for chunk in chunks},
            (),
        ),
        running=0,
        waiting=0,
        seconds_per_token=SECONDS_PER_TOKEN,
    )


def _name(chunk: int) -> str:
    return f"{chunk:024x}"
