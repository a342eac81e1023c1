"""Attention over segments by ``native/attention.cpp``: bf16, on CPUs. Its structures are those of
``native/call.h``, field by field."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.kernel import (
    AttentionPlan,
    Bundle,
    KeyValue,
    Segments,
    View,
    bundle_views,
    farthest,
    seen_views,
)
from kvlinker.engines.embedded.model.rotary import Rotary

SHARED_HEADS = 64
"""The most query heads of a key head whose weights ``mean_weights`` computes."""


def heads(tensor: Tensor) -> tuple[int, ...]:
    """Return the ``Heads`` of call.h for a bf16 tensor [heads, rows, dim] in the CPU's memory."""
    assert tensor.dtype == torch.bfloat16, tensor.dtype
    head_stride, row_stride, dim_stride = tensor.stride()
    assert dim_stride == 1, tensor.stride()
    return tensor.data_ptr(), *tensor.shape, head_stride, row_stride


class Heads(ctypes.Structure):
    """Describes a bf16 tensor [heads, rows, dim]: ``Heads`` of call.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


class Rotation(ctypes.Structure):
    """Describes a rotary embedding by its tables: ``Rotation`` of call.h."""

    tables: tuple[Tensor, Tensor]
    """Cos and sin, whose memory the structure points to."""

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
    )

    @classmethod
    def of(cls, rotary: Rotary | None, length: int) -> Rotation:
        """Return the tables of positions [0, length) or more, and hold their memory."""
        if rotary is None:
            return cls()
        rotation = _ROTATIONS.get(rotary)
        if rotation is None or len(rotation.tables[0]) < length:
            cos, sin = rotary.whole_tables(length)
            rotation = cls(
                cos.data_ptr(), sin.data_ptr(), cos.shape[1], rotary.pairing == "interleaved"
            )
            rotation.tables = cos, sin
            _ROTATIONS[rotary] = rotation
        return rotation


_ROTATIONS: WeakKeyDictionary[Rotary, Rotation] = WeakKeyDictionary()
"""The last rotation of each rotary embedding, which grows with its tables."""


class Write(ctypes.Structure):
    """Describes new keys and values and the slots that they go to: ``Write`` of call.h."""

    _fields_ = (
        ("key", Heads),
        ("value", Heads),
        ("pool_key", Heads),
        ("pool_value", Heads),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rotation", Rotation),
        ("threads", ctypes.c_int64),
    )


class Dots(ctypes.Structure):
    """Describes products of few queries with keys: ``Dots`` of call.h."""

    _fields_ = (
        ("query", Heads),
        ("keys", ctypes.POINTER(Heads)),
        ("parts", ctypes.c_int64),
        ("products", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class NativeCall(ctypes.Structure):
    """Describes the attention of one layer: ``Call`` of call.h."""

    held: tuple[object, ...] = ()
    """Owners of the memory that the structure points to; they live as long as it."""

    _fields_ = (
        ("query", Heads),
        ("output", Heads),
        ("positions", ctypes.c_void_p),
        ("rotation", Rotation),
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


class MeanWeights(ctypes.Structure):
    """Describes attention weights that are wanted, mean over heads: ``MeanWeights`` of call.h."""

    _fields_ = (
        ("call", NativeCall),
        ("means", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


class NativeAttention:
    """Implements ``AttentionKernel`` with native code: keys of even width, rotary embedding whose
    pairing is known.

    Reads keys and values where they lie, and needs no mask however the queries are scattered. There
    is no variant for models in fp32.
    """

    def __init__(self) -> None:
        """Raises NativeUnavailableError."""
        functions = native.functions(
            "attention.cpp",
            {
                "kvlinker_attention": NativeCall,
                "kvlinker_write": Write,
                "kvlinker_mean_weights": MeanWeights,
            },
        )
        self._compute, self._write = functions["kvlinker_attention"], functions["kvlinker_write"]
        self._weigh = functions["kvlinker_mean_weights"]

    @property
    def functions(self) -> tuple[native.Function, native.Function]:
        """The functions of attention.cpp that write new keys and values, and that attend."""
        return self._write, self._compute

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> NativePlan:
        return NativePlan.of(views, positions)

    def write(
        self,
        plan: AttentionPlan,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        rotary: Rotary | None,
        into: KeyValue,
    ) -> None:
        assert isinstance(plan, NativePlan), plan
        rotation = Rotation.of(rotary, plan.last + 1)
        self._write(
            Write(
                key=Heads(*heads(key)),
                value=Heads(*heads(value)),
                pool_key=Heads(*heads(into[0])),
                pool_value=Heads(*heads(into[1])),
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
        call = plan.call(query, segments, rotary, options, output=output.transpose(0, 1))
        self._compute(call)

    def mean_weights(
        self,
        plan: NativePlan,
        query: Tensor,
        segments: Segments,
        rotary: Rotary | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Return what the queries of one sequence, [heads, queries, key_dim] without rotary
        embedding, attend to, mean over heads: [queries, positions up to the last query's], fp32.
        Query heads are at most ``SHARED_HEADS`` times the key heads."""
        length = plan.last + 1
        means = torch.zeros(query.shape[1], length, dtype=torch.float32)
        if plan.table.bundle_count:
            call = plan.call(query, segments, rotary, options, output=query)
            self._weigh(MeanWeights(call, means.data_ptr(), length))
        return means


@dataclass(frozen=True)
class NativePlan(AttentionPlan):
    """Holds what attention.cpp reads besides keys, values and queries."""

    table: Table
    """The bundles and positions, in memory."""

    farthest: int
    """The most positions, in either direction, by which a query is rotated."""

    last: int
    """The last position of a query."""

    @classmethod
    def of(cls, views: Sequence[View], positions: NDArray[np.int64]) -> Self:
        seen = seen_views(views)
        positions = np.ascontiguousarray(positions)
        return cls(
            seen,
            positions,
            Table(bundle_views(seen), positions),
            farthest=farthest(seen, positions),
            last=int(positions.max(initial=0)),
        )

    def call(
        self,
        query: Tensor,
        segments: Segments,
        rotary: Rotary | None,
        options: AttentionOptions,
        *,
        output: Tensor,
    ) -> NativeCall:
        """Return the call for one layer, which is valid as long as it and the tensors are there:
        ``query`` and ``output`` are [heads, queries, dim]."""
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        rotation = Rotation.of(rotary, self.farthest + 1)
        layer = np.array([heads(key) + heads(value) for key, value in segments], np.int64)
        call = NativeCall(
            query=Heads(*heads(query)),
            output=Heads(*heads(output)),
            positions=self.table.positions,
            rotation=rotation,
            segments=layer.ctypes.data,
            views=self.table.views,
            visits=self.table.visits,
            members=self.table.members,
            bundles=self.table.bundles,
            bundle_count=self.table.bundle_count,
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=options.scale,
            softcap=options.softcap or 0.0,
            window=options.window or 0,
            threads=torch.get_num_threads(),
        )
        call.held = sinks, rotation, layer, self.table
        return call


class Table:
    """Lays out bundles as attention.cpp reads them: structures of call.h, whose members all have 64
    bits.

    It holds the memory that they point to. Its attributes are addresses, and the number of bundles.
    """

    def __init__(self, bundles: Sequence[Bundle], positions: NDArray[np.int64]) -> None:
        self._held: list[NDArray[np.generic]] = [positions]
        self.positions = positions.ctypes.data
        views: list[tuple[int, ...]] = []
        visits: list[tuple[int, ...]] = []
        members: list[tuple[int, ...]] = []
        sizes: list[tuple[int, ...]] = []
        for bundle in bundles:
            sizes.append((len(members), len(bundle.members), len(visits), len(bundle.visits)))
            for rows in bundle.members:
                members.append((rows.start, rows.stop - rows.start))
            for visit in bundle.visits:
                first, last = visit[0].first, visit[0].last
                begin = len(views)
                for view in visit:
                    first, last = min(first, view.first), max(last, view.last)
                    masks = 0 if view.hidden is None else self._mask(view.hidden)
                    at = 0 if view.positions is None else self._held_at(view.positions)
                    row = view.start, view.rotary_start, view.first, view.last, masks, at
                    views.append(row)
                visits.append((visit[0].segment, first, last, begin))
        parts = [np.array(rows, np.int64) for rows in (views, visits, members, sizes)]
        self._held += parts
        self.views, self.visits, self.members, self.bundles = [each.ctypes.data for each in parts]
        self.bundle_count = len(sizes)

    def _mask(self, hidden: NDArray[np.bool_]) -> int:
        """Return the address of the mask as bits."""
        bits = np.zeros(len(hidden) // 64 * 8 + 16, np.uint8)  # a word more than there are keys
        packed = np.packbits(hidden, bitorder="little")
        bits[: len(packed)] = packed
        return self._held_at(bits)

    def _held_at(self, array: NDArray[np.generic]) -> int:
        """Return the address of an array, which is held."""
        array = np.ascontiguousarray(array)
        self._held.append(array)
        return array.ctypes.data
