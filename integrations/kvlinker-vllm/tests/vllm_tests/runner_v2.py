"""A pytest plugin under which vLLM's second model runner, whose own kernels are Triton's, runs on
CPUs, and chunks are placed by kvlinker's kernel: ``-p vllm_tests.runner_v2``."""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget


class InterpretingDriver:
    """Tells vLLM that Triton has a backend for CPUs; the interpreter needs none."""

    @staticmethod
    def is_active():
        return True

    def get_current_device(self):
        return 0

    def get_current_stream(self, *_):
        return 0

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_device_interface(self):
        return torch.cpu

    def get_active_torch_device(self):
        return torch.device("cpu")


backends["cpu"] = SimpleNamespace(driver=InterpretingDriver, compiler=None)
triton.runtime.driver.set_active(InterpretingDriver())

from vllm_tests import shadow_caches  # noqa: E402  # imports vLLM, which looks at it

shadow_caches.install()
