"""Measures attention over segments by native code, beside what the processor computes and reads at
most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.threads import set_threads
from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.kernel import AttentionKernel, KeyValue, View
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.engines.native.peaks import Peaks, peaks
from kvlinker.quality.bench.harness.benchmark import Repeat, Setup, benchmark, counts
from kvlinker.quality.bench.harness.measurement import in_turn, seconds_of
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.products import doubts

KV_HEADS = 8
"""The heads of keys and values in a layer, as Llama 3 8B has them."""

KEYS = 4096
"""The tokens that each request attends to: eight chunks of 512."""

SEGMENTS = (1, 8)
"""In how many segments the keys lie: of 4096 and of 512."""

LARGEST = 8_000_000_000
"""Operations after which one measurement ends: some 40 ms on two cores."""

COLUMNS = (
    *("requests", "queries", "heads_per_kv_head", "head_size", "segments"),
    *("ms", "gflop_per_s", "gb_per_s", "of_peak", "torch_fp32_ratio"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """The work of one layer: ``requests`` that all see the same segments, each in an order of its
    own, with ``queries`` each."""

    requests: int
    queries: int
    group: int
    dim: int
    segments: int

    def __str__(self) -> str:
        return (
            f"{self.requests} × {self.queries} queries, {self.group} heads of {self.dim} a KV head,"
            f" {self.segments} segments"
        )

    @property
    def operations(self) -> int:
        """Products of queries and keys, and of weights and values."""
        return 4 * self.requests * self.queries * KV_HEADS * self.group * self.dim * KEYS

    @property
    def bytes(self) -> int:
        """The size of a layer's keys and values in bf16."""
        return 2 * 2 * KV_HEADS * KEYS * self.dim

    def views(self) -> Iterator[View]:
        """Yield what each request sees."""
        tokens = KEYS // self.segments
        for request in range(self.requests):
            rows = slice(request * self.queries, (request + 1) * self.queries)
            for segment in range(self.segments):
                start = (segment + request) % self.segments * tokens
                yield View(segment, rows, start, start, 0, tokens)

    def layers(self, mib: int, dtype: torch.dtype) -> list[list[KeyValue]]:
        """Return the segments of layers that together have ``mib`` MiB of keys and values."""
        shape = KV_HEADS, KEYS // self.segments, self.dim
        count = max(1, (mib << 20) // (self.bytes // 2 * dtype.itemsize))
        return [
            [(_random(shape, dtype), _random(shape, dtype)) for _ in range(self.segments)]
            for _ in range(count)
        ]


@benchmark("attention", runs_model=False, settings=("threads",))
def attention(
    setup: Setup,
    *,
    queries: Annotated[
        str, typer.Option(help="Numbers of queries of one request, with commas between.")
    ] = "1,4,16,33,64,128,256,512",
    requests: Annotated[
        str, typer.Option(help="Numbers of requests that decode over the same segments.")
    ] = "4,16",
    groups: Annotated[str, typer.Option(help="Query heads per KV head.")] = "2",
    dims: Annotated[str, typer.Option(help="Sizes of a head.")] = "64",
    mib: Annotated[
        int, typer.Option(min=1, help="KV in bf16 that takes turns: more than caches hold.")
    ] = 256,
    repeat: Repeat = 9,
) -> Report:
    """Measure attention over 4096 keys, in one segment and in eight, by 8 KV heads: the share of
    the processor's peak that it reaches."""
    sizes = counts(dims)
    if odd := [each for each in sizes if each % 2]:
        raise InvalidRequestError(
            f"--dims {dims}: a head is rotated in pairs, so {odd[0]} must be even.", param="dims"
        )
    set_threads(setup.settings.threads)
    cases = [
        Case(*size, group, dim, segments)
        for group in counts(groups)
        for dim in sizes
        for size in [(1, each) for each in counts(queries)]
        + [(each, 1) for each in counts(requests)]
        for segments in SEGMENTS
    ]
    measured = run_attention(cases, mib=mib, repeat=repeat, progress=setup.progress)
    return replace(measured, command=setup.command)


def run_attention(
    cases: Iterable[Case], *, mib: int, repeat: int, progress: Progress = silent
) -> Report:
    """Compute attention in many layers one after another, beside PyTorch's in fp32; rows are
    medians.

    ``of_peak`` is the time that reading keys and values once, or all products, takes at least,
    whichever is longer, over the time that was measured. Raises InvalidRequestError where there is
    no native code for this processor.
    """
    most, kernel = peaks(), native_attention()
    if most is None or kernel is None:
        raise InvalidRequestError("There is no native attention for this processor.")
    rows: list[Row] = []
    for case in cases:
        count = max(1, LARGEST // case.operations)
        ways = {
            "native": _attention_call(case, kernel, torch.bfloat16, mib, count),
            "torch": _attention_call(
                case, TorchAttention(), torch.float32, mib, max(1, count // 4)
            ),
        }
        taken = in_turn(
            {name: seconds_of(call) for name, (call, _) in ways.items()},
            repeat=repeat,
            what=lambda name, case=case: f"{case}, {name}",  # type: ignore[misc]
            progress=progress,
        )
        each = {name: median(taken[name]) / layers for name, (_, layers) in ways.items()}
        rows.append(_row(case, each["native"], each["torch"], most))
    facts = {
        "peak_tflop_per_s": round(most.operations_per_s / 1e12, 3),
        "read_gb_per_s": round(most.bytes_per_s / 1e9, 1),
    }
    return Report(
        command="kvlinker-lab attention",
        machine=describe_machine(torch.device("cpu")) | facts,
        versions=versions(),
        settings={"keys": KEYS, "kv_heads": KV_HEADS, "mib": mib, "repeat": repeat},
        rows=rows,
        columns=COLUMNS,
        warnings=doubts(row["of_peak"] for row in rows),
    )


def _attention_call(
    case: Case, kernel: AttentionKernel, dtype: torch.dtype, mib: int, most: int
) -> tuple[Callable[[], object], int]:
    """Return a function that computes at most ``most`` of the layers, the following ones with each
    call, and the number of layers of a call."""
    layers = case.layers(mib, dtype)
    count = min(most, len(layers))
    turns = cycle(layers)
    own = np.arange(KEYS, KEYS + case.queries)
    plan = kernel.plan(list(case.views()), np.tile(own, case.requests))
    rotary = _rotary(case.dim)
    size = case.requests * case.queries, KV_HEADS * case.group, case.dim
    query = _random(size, dtype).transpose(0, 1)
    output = torch.empty(size, dtype=dtype)
    options = AttentionOptions(scale=case.dim**-0.5)

    def attend() -> None:
        for segments in islice(turns, count):
            kernel.attend(plan, query, segments, rotary, options, output=output)

    return attend, count


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def _rotary(dim: int) -> Rotary:
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim)

    def apply(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated, other = apply_rotary_pos_emb(query, key, cos, sin)
        return rotated, other

    example = torch.zeros(1, 1, dim), torch.zeros(1, 1, dtype=torch.long)
    longest = config.max_position_embeddings or 2 * KEYS
    return Rotary(LlamaRotaryEmbedding(config), example, {}, apply, width=dim, longest=longest)


def _row(case: Case, seconds: float, torchs: float, most: Peaks) -> Row:
    floor = max(case.bytes / most.bytes_per_s, case.operations / most.operations_per_s)
    return {
        "requests": case.requests,
        "queries": case.queries,
        "heads_per_kv_head": case.group,
        "head_size": case.dim,
        "segments": case.segments,
        "ms": 1e3 * seconds,
        "gflop_per_s": case.operations / seconds / 1e9,
        "gb_per_s": case.bytes / seconds / 1e9,
        "of_peak": floor / seconds,
        "torch_fp32_ratio": seconds / torchs,
    }
