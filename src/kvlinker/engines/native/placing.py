"""Placing by ``native/placing.cpp``: chunks' tokens are gathered, rotated and written to a KV cache
in one pass over memory."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.contract.placing import KeyValue, Rotation, Rounding

_NAMES = {torch.bfloat16: "kvlinker_place_bf16", torch.float32: "kvlinker_place_fp32"}


class _Placing(ctypes.Structure):
    """Describes tokens to place: ``Placing`` of placing.cpp."""

    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("caches", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("angles", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("each", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class NativePlacing:
    """Places tokens in caches in which numbers, or slots, lie beside each other."""

    forms: Collection[torch.dtype] = ()

    def __init__(self) -> None:
        """Compile the functions. Raises NativeUnavailableError."""
        functions = native.functions("placing.cpp", dict.fromkeys(_NAMES.values(), _Placing))
        self._functions = {dtype: functions[name] for dtype, name in _NAMES.items()}

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        return self._functions.keys()

    def place(
        self,
        sources: Sequence[Sequence[KeyValue]],
        caches: Sequence[KeyValue],
        tokens: Tensor,
        rotation: Rotation | None,
        *,
        rounding: Rounding | None = None,
    ) -> None:
        """Place tokens as a ``PlacingKernel`` does, at positions from 0 on."""
        key_cache, _ = caches[0]
        dtype = key_cache.dtype
        given = [tensor for layer in sources for pair in layer for tensor in pair]
        both = [tensor for pair in caches for tensor in pair]
        tables = () if rotation is None else (rotation.cos, rotation.sin)
        if rounding is not None or not all(1 in (each.stride(1), each.stride(3)) for each in both):
            raise LookupError("native code writes rows or columns of numbers as they are")
        if not all(each.stride(-1) == 1 and each.dtype == dtype for each in (*given, *tables)):
            raise LookupError(f"native code takes rows of numbers in {dtype}")
        parts = [
            (key.data_ptr(), value.data_ptr(), *key.stride()[:2], *value.stride()[:2])
            for layer in sources
            for key, value in layer
        ]
        kept = [(each.data_ptr(), *each.stride(), each.shape[-1]) for each in both]
        part_table, cache_table = np.array(parts, np.int64), np.array(kept, np.int64)
        cos, sin = (table.data_ptr() for table in tables) if tables else (None, None)
        assert tokens.is_contiguous()
        self._functions[dtype](
            _Placing(
                parts=part_table.ctypes.data,
                caches=cache_table.ctypes.data,
                tokens=tokens.data_ptr(),
                cos=cos,
                sin=sin,
                pairs=tables[0].shape[1] if tables else 0,
                angles=tables[0].stride(0) if tables else 0,
                interleaved=rotation is not None and rotation.interleaved,
                layers=len(caches),
                each=len(sources[0]),
                heads=key_cache.shape[2],
                count=tokens.shape[1],
                block_size=key_cache.shape[1],
                threads=torch.get_num_threads(),
            )
        )


@cache
def native_placing() -> NativePlacing | None:
    """Return the native placing, compiled when first asked for; None where there is none, and the
    log says why."""
    return native.or_fall_back(NativePlacing, "Chunks are placed layer by layer")
