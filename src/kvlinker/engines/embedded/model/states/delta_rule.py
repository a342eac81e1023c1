"""The gated delta rule by ``native/delta_rule.cpp``, in place of the model's own function: one call
for all tokens of all sequences, which reads and writes each state once where each has one token."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvlinker.engines import native
from kvlinker.engines.embedded.model.states.rules import Gates, Mixed, Rule, RuleCall

DECAYS = {"torch_chunk_gated_delta_rule": "head", "chunk_kimi_delta_attention": "row"}
"""The parts of a state that have a decay of their own, by the function's name: heads, or rows."""

NORMED = "use_qk_l2norm_in_kernel"
LANES = 16


class DeltaRule:
    """Computes a rule as the model's own function does."""

    def __init__(self, compute: native.Function, *, normed: bool) -> None:
        self._compute = compute
        self._normed = normed

    def __call__(
        self, mixed: Mixed, gates: Gates, states: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output [sequences, tokens, heads, columns] of some tokens of each sequence,
        and the states [heads, rows, columns] after them."""
        inputs = [each.float().contiguous() for each in (*mixed, *gates)]
        before = [state.float().contiguous() for state in states]
        after = [torch.empty_like(state) for state in before]
        output = torch.empty_like(inputs[2])
        sequences, tokens, heads, rows = inputs[0].shape
        read, written = (
            (ctypes.c_void_p * sequences)(*(state.data_ptr() for state in states))
            for states in (before, after)
        )
        self._compute(
            _DeltaRule(
                read,
                written,
                *(each.data_ptr() for each in inputs),
                output.data_ptr(),
                sequences,
                tokens,
                heads,
                rows,
                output.shape[-1],
                1 if gates[0].ndim == 3 else rows,
                self._normed,
                torch.get_num_threads(),
            )
        )
        return output.to(mixed[0].dtype), after

    def taking_over(self, call: RuleCall) -> RuleCall:
        """Return the call with this in place of the model's function. Shapes that native code does
        not compute stay the model's, such as fewer heads of keys than of values."""
        rule = call.rule

        def compute(**given: Any) -> Any:
            mixed = tuple(given[name] for name in rule.mixed)
            query, key, value = mixed
            alike = query.shape == key.shape and key.shape[:-1] == value.shape[:-1]
            if value.shape[-1] % LANES or not alike:
                return call.function(**given)
            state = given[rule.initial]
            if state is None:
                shape = (len(key), *key.shape[2:], value.shape[-1])
                state = key.new_zeros(shape, dtype=torch.float32)
            gates = tuple(given[name] for name in rule.gates)
            output, after = self(mixed, gates, list(state))
            return output, torch.stack(after)

        return replace(call, function=compute)


def delta_rule(
    call: RuleCall, state_shape: Sequence[int], device: torch.device
) -> DeltaRule | None:
    """Return what computes this rule; None if native code does not."""
    if call.rule.function not in DECAYS or state_shape[-1] % LANES or device.type != "cpu":
        return None
    if len({each.shape[-2] for each in call.mixed}) > 1:  # fewer heads of keys than of values
        return None
    return rule_like(call.rule, call.function, bool(call.arguments.get(NORMED)))


@cache
def rule_like(rule: Rule, function: Callable[..., Any], normed: bool) -> DeltaRule | None:
    """Return a rule that was compared with the model's function; None if there is none, and the log
    says why."""

    def checked() -> DeltaRule:
        loaded = native.functions("delta_rule.cpp", {"kvlinker_delta_rule": _DeltaRule})
        own = DeltaRule(loaded["kvlinker_delta_rule"], normed=normed)
        generator = torch.Generator().manual_seed(0)
        query, key, value, state = (
            torch.randn(2, *shape, generator=generator)
            for shape in ((5, 3, 24), (5, 3, 24), (5, 3, 80), (3, 24, 80))
        )
        if not normed:  # longer ones than 1 have a state grow beyond measure
            query, key = query / 5, key / 5
        decays = (24,) if DECAYS[rule.function] == "row" else ()
        decay = -torch.rand(2, 5, 3, *decays, generator=generator)
        written = torch.rand(2, 5, 3, generator=generator)
        given = (query, key, value), (decay, written)
        output, last = RuleCall(rule, function, {NORMED: normed}).scan(*given, state)
        found, after = own(*given, list(state))
        native.require_close(found, output, "the output of a rule")
        native.require_close(torch.stack(after), last, "the state behind a rule")
        return own

    return native.or_fall_back(checked, "The rule of states is the model's own")


class _DeltaRule(ctypes.Structure):
    """Describes a call: ``DeltaRule`` of delta_rule.cpp."""

    _fields_ = (
        ("before", ctypes.POINTER(ctypes.c_void_p)),
        ("after", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "decay", "written")),
        ("output", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequences", "tokens", "heads", "rows", "columns")),
        *((name, ctypes.c_int64) for name in ("decays", "normed", "threads")),
    )
