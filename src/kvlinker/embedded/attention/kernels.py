"""What computes attention: PyTorch's kernels, or one of our own where the CPU multiplies bf16."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.embedded.attention.native_kernel import NativeAttention
from kvlinker.embedded.attention.torch_kernels import TorchAttention
from kvlinker.embedded.attention.views import AttentionPlan, KeyValue, Segments, View
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.model.rotary import Rotary
from kvlinker.embedded.native import NativeUnavailableError
from kvlinker.engine.attention import AttentionOptions

logger = logging.getLogger(__name__)

LARGEST_ERROR = 2e-2
"""‖ours − torch's‖ / ‖torch's‖ beyond which native code is not trusted; in bf16 it is around 3e-3."""


class AttentionKernel(Protocol):
    """Computes the attention of a step's queries over the segments that they see."""

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> AttentionPlan:
        """Prepare what is the same in all layers; ``positions`` [queries] are those of all queries of the step."""
        ...

    def write(
        self, plan: AttentionPlan, key: Tensor, value: Tensor, slots: Tensor, rotary: Rotary | None, into: KeyValue
    ) -> None:
        """Write the step's new keys, which are rotated on the way, and values to ``slots`` [queries] of a pool.

        ``key`` and ``value`` are [kv_heads, queries, dim], those of the pool, ``into``, [kv_heads, slots, dim].
        """
        ...

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,
        segments: Segments,
        rotary: Rotary | None,
        options: AttentionOptions,
        *,
        output: Tensor,
    ) -> None:
        """Compute one layer into ``output`` [queries, heads, value_dim], zero where a query sees nothing.

        ``query`` [heads, queries, key_dim] has no rotary embedding; query heads share key heads in equal groups,
        neighbours first. Without ``rotary``, the segments' keys have none either. The plan is one of this kernel.
        """
        ...


def choose_kernel(
    layers: Sequence[LayerShape], *, dtype: torch.dtype, device: torch.device, use_native: bool = True
) -> AttentionKernel:
    """Return the quickest kernel for a model with these layers. Native code is compiled when it is first wanted."""
    fits = device.type == "cpu" and dtype == torch.bfloat16 and all(_fits_native(layer) for layer in layers)
    if fits and use_native:
        return _native_or_torch()
    return TorchAttention()


def _fits_native(layer: LayerShape) -> bool:
    return layer.key_dim % 2 == 0 and (layer.rotary is None or layer.rotary.pairing is not None)


@functools.cache
def _native_or_torch() -> AttentionKernel:
    try:
        kernel = NativeAttention()
        _check(kernel)
    except NativeUnavailableError as error:
        logger.info("Attention takes PyTorch's kernels: %s.", error)
        return TorchAttention()
    return kernel


def _check(kernel: NativeAttention) -> None:
    """Compare with PyTorch on a small case. Raises NativeUnavailableError where they differ."""
    generator = torch.Generator().manual_seed(0)
    positions = np.concatenate([np.arange(3, 160, 7), np.arange(170, 211), [180], np.arange(150, 155)])
    alone, other, third = slice(0, 64), slice(64, 65), slice(65, 70)
    hidden = np.arange(130) % 9 == 4
    views = [View(0, alone, 0, 0, 0, 130, hidden), View(1, alone, 130, 130, 0, 81)]
    views += [View(0, other, 20, 20, 5, 130), View(0, third, 30, 30, 0, 130, hidden), View(1, third, 70, 70, 3, 81)]

    def random(heads: int, rows: int) -> Tensor:
        return torch.randn(heads, rows, 64, generator=generator).bfloat16()

    query, segments = random(6, len(positions)), [(random(2, rows), random(2, rows)) for rows in (130, 81)]
    new, slots = (random(2, len(positions)), random(2, len(positions))), torch.arange(len(positions)).flip(0)
    outputs = []
    for computing in (kernel, TorchAttention()):
        output = query.new_empty(len(positions), 6, 64)
        plan = computing.plan(views, positions)
        pool = new[0].new_empty(new[0].shape), new[1].new_empty(new[1].shape)
        computing.write(plan, *new, slots, None, pool)
        computing.attend(plan, query, segments, None, AttentionOptions(scale=0.125), output=output)
        outputs.append(torch.cat([part.float().flatten() for part in (output, *pool)]))
    ours, expected = outputs
    error = float((ours - expected).norm() / expected.norm())
    if not error <= LARGEST_ERROR:
        raise NativeUnavailableError(f"the native kernel is wrong on this machine, by {error:.1e}")
