"""The state of a sequence in layers that keep one: the summary of all of its tokens so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvlinker.prompting.segments import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """One layer's state. Its tensors are never modified, so that any number of sequences may go on
    from the same one."""

    before: Tensor
    """The window of the next token's convolution: [channels, window]."""

    state: Tensor
    """[heads, rows, columns]."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """The states of all layers that keep one, in order, after the first ``position`` tokens of a
    sequence."""

    position: int
    layers: tuple[LayerState, ...]

    def copied(self) -> SequenceState:
        """Return it in memory of its own: a step's results lie in one tensor for many sequences."""
        return SequenceState(
            self.position,
            tuple(LayerState(each.before.clone(), each.state.clone()) for each in self.layers),
        )


def worth_keeping(prompt: Prompt, endings: Collection[int]) -> tuple[int, ...]:
    """Return the positions in a prompt from where later ones may go on: after the first token that
    ends a turn (one of ``endings``), after the last chunk, and before the last token, which the
    same prompt computes again."""
    turns = np.flatnonzero(np.isin(prompt.tokens, list(endings)))[:1] + 1
    chunks = [span.end for span in prompt.spans][-1:]
    found = {*turns.tolist(), *chunks, len(prompt) - 1}
    return tuple(sorted(each for each in found if 0 < each < len(prompt)))
