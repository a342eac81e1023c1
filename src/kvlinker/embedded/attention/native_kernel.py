"""Attention over segments by ``native/attention.cpp``: bf16 on CPUs with AVX512-BF16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.embedded import native
from kvlinker.embedded.attention.bundles import Bundle, bundle_views
from kvlinker.embedded.attention.views import AttentionPlan, KeyValue, Segments, View
from kvlinker.embedded.model.rotary import Rotary
from kvlinker.embedded.native import NativeUnavailableError
from kvlinker.engine.attention import AttentionOptions

MOST_QUERIES = 8
"""The most queries whose products with keys native code computes faster than PyTorch, which widens all keys first."""


class NativeAttention:
    """Implements ``AttentionKernel`` with native code: keys of even width, rotary embedding whose pairing is known.

    Reads keys and values where they lie, and needs no mask however the queries are scattered. There is no fp32
    variant: models run in fp32 where the CPU does not multiply bf16, and there this code does not run either.
    """

    def __init__(self) -> None:
        """Raises NativeUnavailableError."""
        if not torch.cpu._is_avx512_bf16_supported():
            raise NativeUnavailableError("the CPU has no AVX512-BF16")
        if torch.cpu._is_amx_tile_supported():
            raise NativeUnavailableError("the CPU has AMX, which PyTorch's kernels use")
        library = _library()
        self._compute, self._write = library.kvlinker_attention, library.kvlinker_write

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> NativePlan:
        seen = AttentionPlan.of(views, positions)
        positions = np.ascontiguousarray(positions)
        return NativePlan(
            seen.views,
            positions,
            _Table(bundle_views(seen.views), positions),
            farthest=max((_farthest(view, positions) for view in seen.views), default=0),
            last=int(positions.max(initial=0)),
        )

    def write(
        self, plan: AttentionPlan, key: Tensor, value: Tensor, slots: Tensor, rotary: Rotary | None, into: KeyValue
    ) -> None:
        assert isinstance(plan, NativePlan), plan
        rotation = _Rotation.of(rotary, plan.last + 1)
        self._write(
            _Write(
                key=_Heads(*_heads(key)),
                value=_Heads(*_heads(value)),
                pool_key=_Heads(*_heads(into[0])),
                pool_value=_Heads(*_heads(into[1])),
                positions=plan.table.positions,
                slots=slots.data_ptr(),
                rotation=rotation,
                threads=torch.get_num_threads(),
            )
        )

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
        assert isinstance(plan, NativePlan), plan
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        rotation = _Rotation.of(rotary, plan.farthest + 1)
        table = plan.table
        layer = np.array([_heads(key) + _heads(value) for key, value in segments], np.int64)
        call = _Call(
            query=_Heads(*_heads(query)),
            output=_Heads(*_heads(output.transpose(0, 1))),
            positions=plan.table.positions,
            rotation=rotation,
            segments=layer.ctypes.data,
            views=table.views,
            visits=table.visits,
            members=table.members,
            bundles=table.bundles,
            bundle_count=table.bundle_count,
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=options.scale,
            softcap=options.softcap or 0.0,
            window=options.window or 0,
            threads=torch.get_num_threads(),
        )
        self._compute(call)


def dot_products(query: Tensor, key: Tensor) -> Tensor | None:
    """Return the products of ``query`` [heads, queries, dim] and ``key`` [kv_heads, keys, dim], both bf16 and rotated
    alike: [heads, queries, keys], fp32. None where native code cannot compute them, or not faster than PyTorch."""
    if not (query.is_cpu and query.dtype == key.dtype == torch.bfloat16) or query.shape[1] > MOST_QUERIES:
        return None
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        compute = _library().kvlinker_dots
    except NativeUnavailableError:
        return None
    products = torch.empty(*query.shape[:2], key.shape[1])
    compute(
        _Dots(
            query=_Heads(*_heads(query)),
            key=_Heads(*_heads(key)),
            products=products.data_ptr(),
            threads=torch.get_num_threads(),
        )
    )
    return products


@cache
def _library() -> ctypes.CDLL:
    """Raises NativeUnavailableError."""
    library = native.load_library(Path(native.__file__).with_name("attention.cpp"))
    functions = {"kvlinker_attention": _Call, "kvlinker_write": _Write, "kvlinker_dots": _Dots}
    for name, argument in functions.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.POINTER(argument)]
        function.restype = None
    return library


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """What attention.cpp reads besides keys, values and queries."""

    table: _Table
    farthest: int
    """The most positions, in either direction, by which a query is rotated."""

    last: int
    """The last position of a query."""


def _farthest(view: View, positions: NDArray[np.int64]) -> int:
    first, last = int(positions[view.rows.start]), int(positions[view.rows.stop - 1])
    return max(abs(first - view.offset), abs(last - view.offset))


class _Table:
    """Bundles as attention.cpp reads them: structures whose members all have 64 bits.

    It holds the memory that they point to; all attributes are addresses, but for the number of bundles.
    """

    def __init__(self, bundles: Sequence[Bundle], positions: NDArray[np.int64]) -> None:
        self._held: list[NDArray[np.generic]] = []
        self.positions = self._address(positions)
        views: list[tuple[int, ...]] = []
        visits: list[tuple[int, ...]] = []
        members: list[tuple[int, ...]] = []
        sizes: list[tuple[int, ...]] = []
        for bundle in bundles:
            sizes.append((len(members), len(bundle.members), len(visits), len(bundle.visits)))
            members.extend((rows.start, rows.stop - rows.start) for rows in bundle.members)
            for visit in bundle.visits:
                first, last = min(view.first for view in visit), max(view.last for view in visit)
                visits.append((visit[0].segment, first, last, len(views)))
                views.extend(self._row(view) for view in visit)
        self.views, self.visits, self.members, self.bundles = (
            self._address(np.array(rows, np.int64)) for rows in (views, visits, members, sizes)
        )
        self.bundle_count = len(sizes)

    def _row(self, view: View) -> tuple[int, ...]:
        hidden = positions = 0
        if view.hidden is not None:
            bits = np.zeros(len(view.hidden) // 64 * 8 + 16, np.uint8)  # a word more than there are keys
            packed = np.packbits(view.hidden, bitorder="little")
            bits[: len(packed)] = packed
            hidden = self._address(bits)
        if view.positions is not None:
            positions = self._address(np.ascontiguousarray(view.positions))
        return view.start, view.offset, view.first, view.last, hidden, positions

    def _address(self, array: NDArray[np.generic]) -> int:
        self._held.append(array)
        return array.ctypes.data


def _heads(tensor: Tensor) -> tuple[int, ...]:
    """Return the ``Heads`` of call.h for a bf16 tensor [heads, rows, dim] in the CPU's memory."""
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    head_stride, row_stride, dim_stride = tensor.stride()
    assert dim_stride == 1, tensor.stride()
    return tensor.data_ptr(), *tensor.shape, head_stride, row_stride


class _Heads(ctypes.Structure):
    """``Heads`` of attention.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


class _Rotation(ctypes.Structure):
    """``Rotation`` of attention.cpp."""

    tables: tuple[Tensor, Tensor]

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
    )

    @classmethod
    def of(cls, rotary: Rotary | None, length: int) -> _Rotation:
        """Return the tables of positions [0, length), and hold their memory."""
        if rotary is None:
            return cls()
        cos, sin = rotary.tables(length)
        rotation = cls(cos.data_ptr(), sin.data_ptr(), cos.shape[1], rotary.pairing == "interleaved")
        rotation.tables = cos, sin
        return rotation


class _Write(ctypes.Structure):
    """``Write`` of attention.cpp."""

    _fields_ = (
        ("key", _Heads),
        ("value", _Heads),
        ("pool_key", _Heads),
        ("pool_value", _Heads),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rotation", _Rotation),
        ("threads", ctypes.c_int64),
    )


class _Dots(ctypes.Structure):
    """``Dots`` of attention.cpp."""

    _fields_ = (
        ("query", _Heads),
        ("key", _Heads),
        ("products", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """``Call`` of attention.cpp."""

    _fields_ = (
        ("query", _Heads),
        ("output", _Heads),
        ("positions", ctypes.c_void_p),
        ("rotation", _Rotation),
        ("segments", ctypes.c_void_p),
        ("views", ctypes.c_void_p),
        ("visits", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("bundles", ctypes.c_void_p),
        ("bundle_count", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )
