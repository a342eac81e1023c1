"""Root-mean-square norms by ``native/norms.cpp``: one call instead of six, where it does the same as a model's own."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvlinker.embedded import native
from kvlinker.embedded.native import NativeUnavailableError

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""The attributes in which modules hold what they add to the mean of squares."""

MOST_UNEQUAL = 0.01
"""The share of numbers that may differ from the model's own in the last bit: it adds up in another order."""

logger = logging.getLogger(__name__)


class NormForm(NamedTuple):
    """A way in which models scale what is normed."""

    offset: float
    """What is added to the weight."""
    rounds_first: bool
    """Whether what is normed is rounded to bf16 before it is multiplied by the weight."""


FORMS = [NormForm(offset, rounds_first) for offset, rounds_first in product((0.0, 1.0), (True, False))]


class NativeNorm:
    """Computes what a norm of a model does; its inputs in other precisions are left to the norm itself."""

    def __init__(self, norm: nn.Module, form: NormForm, epsilon: float) -> None:
        """``norm`` has a weight [width] in bf16, and no other parameters."""
        self._norm = norm
        self._form = form
        self._epsilon = epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` [..., width], normed and scaled."""
        weight = self._norm.weight
        compute = native_norm()
        if hidden.dtype != torch.bfloat16 or compute is None or not hidden.is_cpu:
            output: Tensor = type(self._norm).forward(self._norm, hidden)
            return output
        assert isinstance(weight, Tensor), weight
        hidden = hidden.contiguous()
        output = torch.empty_like(hidden)
        width = hidden.shape[-1]
        compute(
            _Norm(
                inputs=hidden.data_ptr(),
                weight=weight.data_ptr(),
                output=output.data_ptr(),
                rows=hidden.numel() // width,
                width=width,
                epsilon=self._epsilon,
                offset=self._form.offset,
                rounds_first=self._form.rounds_first,
                threads=torch.get_num_threads(),
            )
        )
        return output


@torch.no_grad()
def quicken_norms(model: nn.Module) -> None:
    """Let native code compute the norms of ``model`` of which it is known how, in bf16 on CPUs with AVX512-BF16.

    The modules stay as they are but for ``forward``. What a norm does is found by trying: there is no code per family.
    """
    for norm in model.modules():
        weights = list(norm.parameters())
        if len(weights) != 1 or not type(norm).__name__.endswith("RMSNorm"):
            continue
        (weight,) = weights
        if weight.dtype != torch.bfloat16 or weight.dim() != 1 or not weight.is_cpu or native_norm() is None:
            continue
        quick = _quick(norm, weight)
        if quick is not None:
            norm.forward = quick


def _quick(norm: nn.Module, weight: Tensor) -> NativeNorm | None:
    """Return what computes the same as ``norm``; None if nothing is known to."""
    epsilon = next((getattr(norm, name) for name in EPSILONS if isinstance(getattr(norm, name, None), float)), None)
    if epsilon is None:
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 16, len(weight), generator=generator).bfloat16()
    inputs[:, :8] *= 100 * epsilon**0.5  # some rows for which the epsilon matters
    expected: Any = norm(inputs)
    for form in FORMS:
        quick = NativeNorm(norm, form, epsilon)
        found = quick(inputs)
        if isinstance(expected, Tensor) and expected.shape == found.shape and expected.dtype == found.dtype:
            near = torch.allclose(found.float(), expected.float(), rtol=0.01, atol=0.0)
            if near and (found != expected).float().mean() <= MOST_UNEQUAL:
                return quick
    return None


@cache
def native_norm() -> Any:
    """Return ``kvlinker_norm`` of norms.cpp, compiled when first asked for; None where it cannot be had."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        function = native.load_library(Path(native.__file__).with_name("norms.cpp")).kvlinker_norm
    except NativeUnavailableError as error:
        logger.info("Norms are the model's own: %s.", error)
        return None
    function.argtypes = [ctypes.POINTER(_Norm)]
    function.restype = None
    return function


class _Norm(ctypes.Structure):
    """``Norm`` of norms.cpp."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("rounds_first", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )
