"""The wheel for ARM answers in Debian's system for ARM, which an emulator runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tools.arm_system import EMULATOR, PACKAGES, command_of

from tests.programs import README_LIBRARY

pytestmark = pytest.mark.whole

CHECKS = """
import torch
from kvlinker.engines import native
from kvlinker.engines.embedded.attention.kernel_check import require_right
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.attention.position_scores import NativeDots
from kvlinker.engines.embedded.model.weights.native_products import GroupedProducts, load_products
require_right(NativeAttention(), torch.bfloat16, torch.device("cpu"))
NativeDots()
GroupedProducts()
load_products()
print(native.description())
"""
"""Each kernel is compared with PyTorch's when it is loaded; what is wrong raises."""


@pytest.fixture
def system() -> Path:
    if "KVLINKER_ARM" not in os.environ:
        pytest.skip("needs a system for ARM: make test-arm")
    if shutil.which(EMULATOR[0]) is None:
        pytest.skip(f"needs {EMULATOR[0]}")
    return Path(os.environ["KVLINKER_ARM"])


def test_the_kernels_are_right_and_the_readmes_program_is_answered(
    system: Path, tmp_path: Path
) -> None:
    program, printed = README_LIBRARY
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GOMP_SPINCOUNT": "1000"}
    said = subprocess.run(
        command_of(system, "-c", CHECKS + program),
        env=variables | {"PYTHONPATH": str(system / PACKAGES)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert said == f"neon-bf16, shipped\n{printed}"
