"""Root-mean-square norms by ``native/norms.cpp``: one call instead of six, where it does the same
as a model's own."""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvlinker.engines import native

EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""The attributes in which modules hold what they add to the mean of squares."""

UNEQUAL_LIMIT = 0.01
"""The share of numbers that may differ from the model's own in the last bit: it adds up in another
order."""


class NormForm(NamedTuple):
    """Describes how a model scales what is normed."""

    offset: float
    """The number that is added to each weight."""

    rounds_first: bool
    """True if what is normed is rounded to bf16 before it is multiplied by the weight."""


FORMS = [
    NormForm(offset, rounds_first) for offset, rounds_first in product((0.0, 1.0), (True, False))
]


class NativeNorm:
    """Computes what a norm of a model does; its inputs in other precisions are left to the norm
    itself."""

    def __init__(self, norm: nn.Module, form: NormForm, epsilon: float) -> None:
        """``norm`` has a weight [width] in bf16, and no other parameters."""
        self._norm = norm
        self.form = form
        self.epsilon = epsilon

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
                epsilon=self.epsilon,
                offset=self.form.offset,
                rounds_first=self.form.rounds_first,
                threads=torch.get_num_threads(),
            )
        )
        return output


@torch.no_grad()
def quicken_norms(model: nn.Module) -> None:
    """Let native code compute the norms of ``model`` of which it is known how, in bf16 on CPUs.

    Only the modules' ``forward`` changes. The computation of a norm is found by trying: there is no
    code per family.
    """
    for norm in model.modules():
        weights = list(norm.parameters())
        if len(weights) != 1 or not type(norm).__name__.endswith("RMSNorm"):
            continue
        (weight,) = weights
        if (
            weight.dtype != torch.bfloat16
            or weight.dim() != 1
            or not weight.is_cpu
            or native_norm() is None
        ):
            continue
        quick = _quick(norm, weight)
        if quick is not None:
            norm.forward = quick


def _quick(norm: nn.Module, weight: Tensor) -> NativeNorm | None:
    """Return a native norm that computes the same as ``norm``; None if no form of norms.cpp
    does."""
    epsilon = next(
        (getattr(norm, name) for name in EPSILONS if isinstance(getattr(norm, name, None), float)),
        None,
    )
    if epsilon is None:
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 16, len(weight), generator=generator).bfloat16()
    inputs[:, :8] *= 100 * epsilon**0.5  # some rows for which the epsilon matters
    expected: Any = norm(inputs)
    for form in FORMS:
        quick = NativeNorm(norm, form, epsilon)
        found = quick(inputs)
        if (
            isinstance(expected, Tensor)
            and expected.shape == found.shape
            and expected.dtype == found.dtype
        ):
            near = torch.allclose(found.float(), expected.float(), rtol=0.01, atol=0.0)
            if near and (found != expected).float().mean() <= UNEQUAL_LIMIT:
                return quick
    return None


@cache
def native_norm() -> native.Function | None:
    """Return ``kvlinker_norm`` of norms.cpp, compiled when first asked for; None if there is none,
    and the log says why. ``quicken_norms`` compares it with every norm of a model before it takes
    the norm's place."""
    return native.or_fall_back(
        lambda: native.functions("norms.cpp", {"kvlinker_norm": _Norm})["kvlinker_norm"],
        "Norms are the model's own",
    )


class _Norm(ctypes.Structure):
    """Describes the norms of rows: ``Norm`` of norms.cpp."""

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
