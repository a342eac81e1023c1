"""The state of a sequence in layers that keep one: what all of its tokens so far amount to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """One layer's state. Its tensors are never modified, so that any number of sequences may go on
    from the same one."""

    before: Tensor
    """What the convolution of the next token sees: [channels, window]."""

    state: Tensor
    """[heads, rows, columns]."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """The states of all layers that keep one, in order, behind the first ``position`` tokens of a
    sequence."""

    position: int
    layers: tuple[LayerState, ...]
