"""The kernels compile for GPUs, down to machine code, and need no more than these have."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""What a thread and a program may take there."""


@pytest.mark.whole
def test_kernels_fit_every_gpu_without_spilling():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.engines.gpu.compiling"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = json.loads(told)
    assert {each["target"] for each in found} == set(REGISTERS)
    for each in found:
        assert each["registers"] <= REGISTERS[each["target"]], each
        assert each["shared_bytes"] <= SHARED[each["target"]], each
        assert each["spilled"] == 0, each
