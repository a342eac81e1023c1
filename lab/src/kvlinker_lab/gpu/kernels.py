"""``python -m kvlinker_lab.gpu.kernels FILE``: compares kernels for GPUs with PyTorch's, in each
precision, and writes what differs by too much."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kvlinker.engines.embedded.attention.kernel_check import require_right
from kvlinker.engines.embedded.attention.triton_attention import TritonAttention
from kvlinker.engines.gpu.launching import DTYPES


def check(device: torch.device) -> list[dict[str, str]]:
    """Return a row for each precision."""
    rows = []
    for dtype in DTYPES:
        if device.type == "cpu" and dtype == torch.bfloat16:
            continue  # NumPy, which the interpreter computes with, has no such numbers
        outcome = "right"
        try:
            require_right(TritonAttention(), dtype, device)
        except Exception as error:  # whatever the compiler or the driver raises
            outcome = f"{type(error).__name__}: {error}"
        rows.append({"dtype": str(dtype), "device": str(device), "outcome": outcome})
    return rows


if __name__ == "__main__":
    found = check(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    Path(sys.argv[1]).write_text(json.dumps({"results": found}))
    sys.exit(any(row["outcome"] != "right" for row in found))
