"""Time shipped native code beside the same code compiled on this machine: ``make dist`` leaves the
libraries in ``build/native``.

``python tools/compare_native.py build/native/x86_64`` multiplies few rows by weights in bf16, by
each in turns, so that both meet the same load.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import thread_time_ns

import torch

from kvlinker.engines import native
from kvlinker.engines.embedded.model.weights.matrices import BlockedMatrix
from kvlinker.engines.embedded.model.weights.native_products import load_products

ROWS, OUTPUTS, WIDTH = 4, 2048, 1024
TURNS = 400


def main(shipped: Path) -> None:
    """Print the ratios of both times of processor."""
    native.SHIPPED = shipped
    torch.set_num_threads(1)
    products = []
    for here in (False, True):
        native.build_here(here)
        print(native.description())
        products.append(load_products())
    weight = BlockedMatrix(torch.randn(OUTPUTS, WIDTH).bfloat16())
    inputs = torch.randn(ROWS, WIDTH).bfloat16()
    times: list[list[int]] = [[], []]
    for turn in range(2 * TURNS):
        began = thread_time_ns()
        products[turn % 2].multiply(
            "bf16", inputs, weight.blocks.data_ptr(), OUTPUTS, group=WIDTH, bias=None
        )
        times[turn % 2].append(thread_time_ns() - began)
    of_shipped, of_built = times
    print(
        f"compiled here ÷ shipped: median {median(of_built) / median(of_shipped):.2f},"
        f" fastest {min(of_built) / min(of_shipped):.2f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
