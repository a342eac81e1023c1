"""kvlinker's kernels for GPUs run where Triton interprets them, which it has to know before vLLM
imports it."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def interpreted() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1, as make test-vllm does for such tests")
