"""Measures steps of decoding that native code computes, beside the same by the model's modules, and
what a step takes outside native code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.threads import in_own_thread
from kvlinker.engines.embedded.attention.kernels import step_kernel
from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, VisibleKV
from kvlinker.engines.embedded.execution.compiled.compiled_step import CompiledStep
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.kv_cache.states import LayerState, SequenceState
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model.recording.program import Program
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, counts
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel

COLUMNS = ("requests", "modules_ms", "native_ms", "outside_ms", "ratio")


@benchmark("steps")
def steps(
    setup: Setup,
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4,16",
    context_tokens: Annotated[int, typer.Option(min=1, help="Tokens before the step's.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind, in turn.")] = 24,
) -> Report:
    """Measure steps of decoding in native code, beside the same by the model's modules."""
    subject = setup.subject(context_tokens=context_tokens, steps=steps)
    return run_steps(subject, counts(batches), context_tokens=context_tokens, steps=steps)


@in_own_thread
def run_steps(
    subject: MeasuredModel,
    batches: Sequence[int],
    *,
    context_tokens: int = 512,
    steps: int = 24,
) -> Report:
    """Compute steps of ``batches`` requests by the modules, in native code, and with native code
    left out, in turn; rows are medians of ``steps`` steps.

    Raises InvalidRequestError for a model whose steps native code does not compute.
    """
    loaded = subject.loaded
    program = loaded.program
    if not isinstance(program, Program):
        raise InvalidRequestError(
            f"Native code computes no steps of this model: {loaded.computes_steps}."
        )
    slots = max(batches) * (context_tokens + 1)
    pool = KVPool(loaded.layers, slots, dtype=loaded.dtype, device=loaded.device)
    modules = Runner(loaded.model, loaded.anatomy, pool)
    kernel = step_kernel(loaded.layers, dtype=loaded.dtype, device=loaded.device)
    assert kernel is not None, "its steps were found to be computed by native code"
    ahead = LayersAhead(None, len(pool.keys))
    compiled, without = (
        CompiledStep(program, loaded.anatomy, pool, kernel, ahead, compute=compute)
        for compute in (None, lambda step: None)
    )
    rows: list[Row] = []
    for requests in batches:
        batch = decoding_batch(requests, context_tokens, loaded)
        kinds: list[Callable[[Batch], object]] = [
            modules.step,
            compiled.compute,
            without.compute,
        ]
        taken = [[_seconds(kind, batch) for kind in kinds] for _ in range(steps + 1)][1:]
        by_modules, whole, outside = (1e3 * median(each) for each in zip(*taken, strict=True))
        rows.append(
            {
                "requests": requests,
                "modules_ms": by_modules,
                "native_ms": whole - outside,
                "outside_ms": outside,
                "ratio": whole / by_modules,
            }
        )
    return replace(subject.report(rows), columns=COLUMNS)


def decoding_batch(requests: int, context_tokens: int, loaded: LoadedModel) -> Batch:
    """Return a step in which each request computes the token behind ``context_tokens`` of its own.
    Layers that keep a state have that of the beginning: it takes as long."""
    layers = tuple(
        LayerState(
            torch.zeros(each.channels, each.window, dtype=loaded.dtype),
            torch.zeros(each.state_shape, device=loaded.device),
        )
        for each in loaded.anatomy.recurrences
    )
    state = SequenceState(context_tokens, layers) if layers else None
    size = context_tokens + 1
    own = np.arange(size)
    runs = []
    visible_kv: dict[object, VisibleKV] = {}
    for owner in range(requests):
        spans = (SlotSpan(owner * size, size),)
        visible_kv[owner] = VisibleKV((), spans, own, OwnTokens(own, ()), state)
        token = np.array([owner % loaded.vocabulary])
        slots = np.array([owner * size + context_tokens])
        runs.append(Run(slots, context_tokens, token, True, owner=owner))
    return Batch(tuple(runs), visible_kv)


def _seconds(compute: Callable[[Batch], object], batch: Batch) -> float:
    begin = time.perf_counter()
    compute(batch)
    return time.perf_counter() - begin
