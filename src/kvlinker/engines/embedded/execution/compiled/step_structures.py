"""The structures that ``native/step.cpp`` takes, field by field as there."""

from __future__ import annotations

import ctypes

from kvlinker.engines.embedded.attention.native_call import NativeCall, Rotation, Write


class StepOperand(ctypes.Structure):
    """Numbers of each token: ``Operand`` of step.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("wide", ctypes.c_int64),
    )


class StepOperation(ctypes.Structure):
    """``Operation`` of step.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("behind_gather", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("one", StepOperand),
        ("other", StepOperand),
        ("output", StepOperand),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("rounds_first", ctypes.c_int64),
        ("by_tokens", ctypes.c_int64),
        ("function", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
        ("argument_rows", ctypes.c_void_p),
        ("argument_threads", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
    )


class StepAttention(ctypes.Structure):
    """One layer's attention: ``Attention`` of step.cpp."""

    _fields_ = (
        ("write", Write),
        ("call", NativeCall),
        ("writes", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
    )


class StepSight(ctypes.Structure):
    """The views of all queries in some layers: ``Sight`` of step.cpp."""

    _fields_ = (
        ("views", ctypes.c_void_p),
        ("visits", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("bundles", ctypes.c_void_p),
        ("bundle_count", ctypes.c_int64),
    )


class NativeStep(ctypes.Structure):
    """One step, or a part of its operations: ``Step`` of step.cpp."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("layers", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("attend", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("wanted_rows", ctypes.c_void_p),
        ("rotations", ctypes.POINTER(Rotation)),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("sights", ctypes.POINTER(StepSight)),
        ("sight_of", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )
