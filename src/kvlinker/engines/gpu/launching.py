"""Launches the kernels over tensors: tables of addresses, sizes of blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.placing import KeyValue, Rotation, Rounding
from kvlinker.engines.gpu.placing import place_tokens

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""The types in which the kernels compute."""

SMALLEST = 16
"""The fewest rows or columns of a matrix that tensor cores multiply."""

PLACED_TOKENS = 32
"""The tokens of one head that one program places."""


FEW_PROGRAMS = 64
"""The programs that read from the host's memory during computations: enough to fill the bus, with
16 KiB each on their way, and few enough to leave most processors to others."""


class FP8(NamedTuple):
    """A form of numbers in eight bits."""

    mantissa: int
    bias: int
    largest: float
    one_zero: bool = False
    """True if zero has no sign."""


FP8_FORMS = {
    torch.float8_e4m3fn: FP8(3, 7, 448.0),
    torch.float8_e5m2: FP8(2, 15, 57344.0),
    torch.float8_e4m3fnuz: FP8(3, 8, 240.0, one_zero=True),
}
"""The forms in which KV caches are kept; the last one is AMD's."""


def on_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy a table to the device, without waiting for its work."""
    table = torch.from_numpy(values)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def all_on_device(tables: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy several tables to the device at once, flat."""
    flat = [table.reshape(-1) for table in tables]
    joined = on_device(np.concatenate(flat), device)
    return list(torch.split(joined, [len(table) for table in flat]))


def block_of(size: int) -> int:
    """Return the smallest block of columns that holds ``size`` of them."""
    return max(SMALLEST, int(triton.next_power_of_2(size)))


def is_aligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether all rows of the tensors begin at multiples of 16 bytes."""
    return all(
        tensor.data_ptr() % 16 == 0
        and all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def addresses(pairs: Sequence[KeyValue]) -> list[tuple[int, ...]]:
    """Return, for each key and value [heads, rows, dim], both addresses and their strides of heads
    and rows."""
    return [
        (key.data_ptr(), value.data_ptr(), *key.stride()[:2], *value.stride()[:2])
        for key, value in pairs
    ]


def place_kv(
    sources: Sequence[Sequence[KeyValue]],
    caches: Sequence[KeyValue],
    tokens: Tensor,
    rotation: Rotation | None,
    *,
    rounding: Rounding | None = None,
    programs: int | None = None,
    table: Tensor | None = None,
) -> None:
    """Place tokens of all layers in one launch, as a ``PlacingKernel`` does; negative positions
    turn backwards, and tokens with a negative slot are left out. At most ``programs`` programs run,
    as many as possible by default. The ``table`` on the device will have the ``placing_addresses``
    when the kernel runs; without it, it is made."""
    key, value = caches[0]
    heads, key_dim, value_dim = key.shape[2], key.shape[3], value.shape[3]
    width = 0 if rotation is None else 2 * rotation.cos.shape[1]
    cos, sin = (tokens, tokens) if rotation is None else (rotation.cos, rotation.sin)
    flat = [tensor for layer in sources for pair in layer for tensor in pair]
    both = [tensor for pair in caches for tensor in pair]
    dtype = flat[0].dtype
    assert all(tensor.stride(-1) == 1 and tensor.dtype == dtype for tensor in flat)
    kept = dtype if rounding is None else torch.uint8
    assert all(tensor.stride(-1) == 1 and tensor.dtype == kept for tensor in both)
    form = FP8(0, 0, 0.0) if rounding is None else FP8_FORMS[rounding.dtype]
    if table is None:
        table = on_device(placing_addresses(sources, caches, rounding), tokens.device)
    count = tokens.shape[1]
    work = triton.cdiv(count, PLACED_TOKENS) * heads * len(caches)
    place_tokens[(min(work, programs or work),)](
        table,
        table[6 * len(sources) * len(sources[0]) :],
        tokens,
        cos,
        sin,
        count,
        len(sources[0]),
        heads,
        len(caches),
        cos.stride(0),
        key.shape[1],
        DTYPE=DTYPES[dtype],
        MANTISSA=form.mantissa,
        BIAS=form.bias,
        LARGEST=form.largest,
        ONE_ZERO=form.one_zero,
        WIDTH=width,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        INTERLEAVED=rotation is not None and rotation.interleaved,
        ALIGNED=is_aligned(flat + both),
        PAIRS_BLOCK=block_of(width // 2),
        REST_BLOCK=block_of(key_dim - width),
        VALUE_BLOCK=block_of(value_dim),
        BLOCK_TOKENS=PLACED_TOKENS,
    )


def placing_addresses(
    sources: Sequence[Sequence[KeyValue]],
    caches: Sequence[KeyValue],
    rounding: Rounding | None = None,
) -> NDArray[np.int64]:
    """Return where ``place_kv`` finds and puts keys and values, flat."""
    scales = [(0, 0)] * len(caches)
    if rounding is not None:
        assert all(scale.dtype == torch.float32 for pair in rounding.scales for scale in pair)
        scales = [(one.data_ptr(), other.data_ptr()) for one, other in rounding.scales]
    rows = [row for layer in sources for row in addresses(layer)]
    caches_rows = [
        (one.data_ptr(), other.data_ptr(), *one.stride()[:3], *other.stride()[:3], *scale)
        for (one, other), scale in zip(caches, scales, strict=True)
    ]
    return np.array([*np.ravel(rows), *np.ravel(caches_rows)], np.int64)


class TritonPlacing:
    """Places tokens beside computations, by few programs."""

    dtypes: Collection[torch.dtype] = DTYPES.keys()
    forms: Collection[torch.dtype] = FP8_FORMS.keys()

    def place(
        self,
        sources: Sequence[Sequence[KeyValue]],
        caches: Sequence[KeyValue],
        tokens: Tensor,
        rotation: Rotation | None,
        *,
        rounding: Rounding | None = None,
    ) -> None:
        """Place tokens as a ``PlacingKernel`` does."""
        place_kv(sources, caches, tokens, rotation, rounding=rounding, programs=FEW_PROGRAMS)
