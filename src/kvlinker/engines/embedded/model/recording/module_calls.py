"""Modules of a model that compute between operations of native code: experts, whose routers are
the model's own, and layers that keep a state."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class CallRows(ctypes.Structure):
    """What step.cpp fills in before it calls a function."""

    _fields_ = (("rows", ctypes.c_int64), ("threads", ctypes.c_int64))


class BoundModule:
    """A module with the memory that it computes from and to, as a function for native code."""

    def __init__(
        self,
        compute: Callable[[Tensor], Any],
        inputs: Tensor,
        outputs: Tensor,
        failed: list[BaseException],
    ) -> None:
        """``compute`` calls the module. ``inputs`` and ``outputs`` are [rows, width], for as many
        rows as a step may have; what goes wrong is added to ``failed``, for native code cannot
        raise."""
        self._call = compute
        self._inputs = inputs
        self._outputs = outputs
        self._failed = failed
        self.rows = CallRows()
        self.function = CALLBACK(self._compute)

    def _compute(self, _: int | None) -> None:
        if self._failed:
            return
        try:
            rows = self.rows.rows
            with torch.inference_mode():
                output = self._call(self._inputs[None, :rows])
                first = output[0] if isinstance(output, tuple) else output
                self._outputs[:rows] = first.view(rows, -1)
        except BaseException as error:
            self._failed.append(error)
