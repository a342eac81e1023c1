"""Measures products of rows and weights in each format, beside what the processor computes and
reads at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.threads import set_threads
from kvlinker.engines.embedded.model.weights.matrices import BlockedMatrix, Matrix
from kvlinker.engines.embedded.model.weights.native_products import native_products
from kvlinker.engines.embedded.model.weights.native_quantized import (
    NativeInt4Matrix,
    NativeInt8Matrix,
)
from kvlinker.engines.native.peaks import Peaks, peaks
from kvlinker.quality.bench.harness.benchmark import Repeat, Setup, benchmark, counts
from kvlinker.quality.bench.harness.measurement import in_turn
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker.quality.progress import Progress, silent

OUTPUTS, INPUTS = 2816, 1024
"""The sizes of the matrix: the 285M shape's largest."""

FORMATS: Mapping[str, Callable[[Tensor], Matrix]] = {
    "bf16": BlockedMatrix,
    "int8": lambda weight: NativeInt8Matrix(weight, sampled=torch.randn(8, INPUTS).bfloat16()),
    "int8, inputs in 16": NativeInt8Matrix,
    "int4": NativeInt4Matrix,
}

IN_BYTES = ("int8", "int4")
"""The formats whose products are of integers of 8 bits."""

ROWS = "1,2,4,8,16,33,64,128,256"

COLUMNS = ("weights", "rows", "ms", "gflop_per_s", "gb_per_s", "of_peak", "torch_fp32_ratio")


@benchmark("products", runs_model=False, settings=("threads",))
def products(
    setup: Setup,
    *,
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas between.")] = ROWS,
    mib: Annotated[
        int, typer.Option(min=1, help="Weights in bf16 that take turns: more than caches hold.")
    ] = 256,
    repeat: Repeat = 9,
    cpu_time: Annotated[
        bool,
        typer.Option(
            help="Measure one thread's time on the processor: for a machine that is busy."
        ),
    ] = False,
) -> Report:
    """Measure products of rows and weights in bf16, 8 and 4 bits: the share of the processor's peak
    that they reach. Inputs in 8 bits meet weights in 8 and 4 bits, or those of 16 weights in 8."""
    set_threads(1 if cpu_time else setup.settings.threads)
    measured = run_products(
        counts(rows), mib=mib, repeat=repeat, cpu_time=cpu_time, progress=setup.progress
    )
    return replace(measured, command=setup.command)


def run_products(
    numbers: list[int],
    *,
    mib: int,
    repeat: int,
    cpu_time: bool = False,
    progress: Progress = silent,
) -> Report:
    """Multiply rows by many matrices one after another, all formats in turn; rows are medians, of
    times on the processor with ``cpu_time``.

    ``of_peak`` is the time that reading the weights, or all arithmetic, takes at least, whichever
    is longer, over the time that was measured; None with ``cpu_time``, since peaks are by the
    clock. Raises InvalidRequestError where there is no native code for this processor.
    """
    clock = time.thread_time if cpu_time else time.perf_counter
    most = peaks()
    if most is None or native_products() is None:
        raise InvalidRequestError("There is no native code for this processor.")
    count = max(1, (mib << 20) // (2 * OUTPUTS * INPUTS))
    plain = torch.randn(OUTPUTS, INPUTS)
    weights: dict[str, list[Any]] = {
        name: [kind(plain.bfloat16()) for _ in range(count)] for name, kind in FORMATS.items()
    }
    weights["fp32"] = [plain.clone() for _ in range(max(1, count // 2))]
    rows: list[Row] = []
    for number in numbers:
        hidden = torch.randn(number, INPUTS)
        taken = in_turn(
            {name: _time(_multiplication(hidden, each), clock) for name, each in weights.items()},
            repeat=repeat,
            what=lambda name, number=number: f"{number} rows, {name}",  # type: ignore[misc]
            progress=progress,
        )
        each = {name: median(seconds) / len(weights[name]) for name, seconds in taken.items()}
        found = [_row(name, number, each, _bytes(weights[name][0]), most) for name in FORMATS]
        rows += [{**row, "of_peak": None} if cpu_time else row for row in found]
    facts = {
        "peak_tflop_per_s": round(most.operations_per_s / 1e12, 3),
        "peak_int8_top_per_s": round(most.byte_operations_per_s / 1e12, 3),
        "read_gb_per_s": round(most.bytes_per_s / 1e9, 1),
    }
    return Report(
        command="kvlinker-lab products",
        machine=describe_machine(torch.device("cpu")) | facts,
        versions=versions(),
        settings={"matrix": f"{OUTPUTS} × {INPUTS}", "mib": mib, "repeat": repeat},
        rows=rows,
        columns=COLUMNS,
        warnings=doubts(row["of_peak"] for row in rows),
    )


def doubts(shares: Iterable[float | None]) -> list[str]:
    """Return a warning where a share of the peaks is more than all."""
    most = max((each for each in shares if each is not None), default=0.0)
    if most <= 1:
        return []
    return [f"{most:.2f} of the peak: others computed while that was measured. Measure again."]


def _time(call: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    """Wrap a call so that it returns the seconds that it takes by this clock."""

    def time_call() -> float:
        begin = clock()
        call()
        return clock() - begin

    return time_call


def _multiplication(hidden: Tensor, weights: list[Any]) -> Callable[[], object]:
    if isinstance(weights[0], Tensor):
        return lambda: [nn.functional.linear(hidden, weight) for weight in weights]
    rounded = hidden.bfloat16()
    return lambda: [matrix.multiply(rounded, None) for matrix in weights]


def _bytes(matrix: Matrix) -> int:
    return sum(tensor.nbytes for tensor in (*matrix.parameters(), *matrix.buffers()))


def _row(name: str, number: int, seconds: Mapping[str, float], size: int, most: Peaks) -> Row:
    operations = 2 * number * OUTPUTS * INPUTS
    rate = most.byte_operations_per_s if name in IN_BYTES else most.operations_per_s
    floor = max(size / most.bytes_per_s, operations / rate)
    return {
        "weights": name,
        "rows": number,
        "ms": 1e3 * seconds[name],
        "gflop_per_s": operations / seconds[name] / 1e9,
        "gb_per_s": size / seconds[name] / 1e9,
        "of_peak": floor / seconds[name],
        "torch_fp32_ratio": seconds[name] / seconds["fp32"],
    }
