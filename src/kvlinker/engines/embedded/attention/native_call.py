"""The structures that the functions of ``native/attention.cpp`` take, field by field as in
``native/call.h``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvlinker.engines.embedded.model.rotary import Rotary


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
        """Return the tables of positions [0, length), and hold their memory."""
        if rotary is None:
            return cls()
        cos, sin = rotary.tables(length)
        rotation = cls(
            cos.data_ptr(), sin.data_ptr(), cos.shape[1], rotary.pairing == "interleaved"
        )
        rotation.tables = cos, sin
        return rotation


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
