"""One step of the gated delta rule for many sequences by ``native/delta_step.cpp``, when they
decode: one call, which reads and writes each state once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvlinker.engines.embedded import native
from kvlinker.engines.embedded.model.states.rules import Gates, Mixed, Rule, RuleCall

RULE = "torch_chunk_gated_delta_rule"
NORMED = "use_qk_l2norm_in_kernel"
LANES, MOST_COLUMNS = 16, 256


class DeltaStep:
    """Computes steps of a rule as the model's own function does."""

    def __init__(self, compute: native.Function, *, normed: bool) -> None:
        self._compute = compute
        self._normed = normed

    def __call__(
        self, mixed: Mixed, gates: Gates, states: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output [sequences, 1, heads, columns] of one token for each sequence, and the
        states [heads, rows, columns] behind it."""
        inputs = [each.float().contiguous() for each in (*mixed, *gates)]
        before = [state.contiguous() for state in states]
        after = [torch.empty_like(state) for state in before]
        output = torch.empty_like(inputs[2])
        heads, rows, columns = before[0].shape
        pointers = ctypes.c_void_p * len(before)
        self._compute(
            _DeltaStep(
                pointers(*(state.data_ptr() for state in before)),
                pointers(*(state.data_ptr() for state in after)),
                *(each.data_ptr() for each in inputs),
                output.data_ptr(),
                len(before),
                heads,
                rows,
                columns,
                self._normed,
                torch.get_num_threads(),
            )
        )
        return output.to(mixed[0].dtype), after


def delta_step(
    call: RuleCall, state_shape: Sequence[int], device: torch.device
) -> DeltaStep | None:
    """Return what computes steps of this rule; None where native code does not."""
    columns = state_shape[-1]
    fits = not columns % LANES and columns <= MOST_COLUMNS and device.type == "cpu"
    if call.rule.function != RULE or not fits:
        return None
    return _step_like(call.rule, call.function, bool(call.arguments.get(NORMED)))


@cache
def _step_like(rule: Rule, function: Callable[..., Any], normed: bool) -> DeltaStep | None:
    """Return steps that were compared with the model's function; None where there are none, and
    the log says why."""

    def checked() -> DeltaStep:
        loaded = native.functions("delta_step.cpp", {"kvlinker_delta_step": _DeltaStep})
        step = DeltaStep(loaded["kvlinker_delta_step"], normed=normed)
        generator = torch.Generator().manual_seed(0)
        query, key, value, state = (
            torch.randn(2, *shape, generator=generator)
            for shape in ((1, 3, 24), (1, 3, 24), (1, 3, 32), (3, 24, 32))
        )
        gates = tuple(torch.rand(2, 1, 3, generator=generator) for _ in range(2))
        given = (query, key, value), (-gates[0], gates[1])
        output, last = RuleCall(rule, function, {NORMED: normed}).scan(*given, state)
        found, after = step(*given, list(state))
        native.require_close(found, output, "the output of a step")
        native.require_close(torch.stack(after), last, "the state behind a step")
        return step

    return native.or_fall_back(checked, "Steps of states are the model's own")


class _DeltaStep(ctypes.Structure):
    """Describes a step: ``DeltaStep`` of delta_step.cpp."""

    _fields_ = (
        ("before", ctypes.POINTER(ctypes.c_void_p)),
        ("after", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "decay", "written")),
        ("output", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "rows", "columns")),
        ("normed", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )
