"""The state of a sequence in layers that keep one, the summary of all of its tokens so far, and the
states that are kept in the tree of prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvlinker.engines.embedded.kv_cache.prefix_node import Part, PrefixNode
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

    @property
    def is_finite(self) -> bool:
        """True if it has no NaN and no infinity."""
        return all(bool(layer.state.isfinite().all()) for layer in self.layers)

    def copied(self) -> SequenceState:
        """Return it in memory of its own: a step's results lie in one tensor for many sequences."""
        return SequenceState(
            self.position,
            tuple(LayerState(each.before.clone(), each.state.clone()) for each in self.layers),
        )


def kept_positions(prompt: Prompt, endings: Collection[int]) -> tuple[int, ...]:
    """Return the positions in a prompt from where later ones may go on: after the first token that
    ends a turn (one of ``endings``), after the last chunk, and before the last token, which the
    same prompt computes again."""
    turns = np.flatnonzero(np.isin(prompt.tokens, list(endings)))[:1] + 1
    chunks = [span.end for span in prompt.spans][-1:]
    found = {*turns.tolist(), *chunks, len(prompt) - 1}
    return tuple(sorted(each for each in found if 0 < each < len(prompt)))


class PrefixStates:
    """The states at the ends of nodes of the tree of prefixes: those that were used last, a limited
    number. An evicted node loses its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: OrderedDict[PrefixNode, SequenceState] = (
            OrderedDict()
        )  # the last used one last

    def __len__(self) -> int:
        return len(self._states)

    def at(self, node: PrefixNode) -> SequenceState | None:
        """Return the state after the node's last item, if it was kept."""
        if node in self._states:
            self._states.move_to_end(node)
        return self._states.get(node)

    def furthest(self, parts: Sequence[Part]) -> tuple[int, list[Part]]:
        """Return where the last state stands in ``parts``, nodes from the root on with a number of
        items of each, and the parts that end there: 0 and the root without any."""
        for index, (node, count) in reversed(list(enumerate(parts))):
            state = self.at(node) if count == len(node.items) else None
            if state is not None:
                return state.position, list(parts[: index + 1])
        return 0, list(parts[:1])

    def put(self, node: PrefixNode, state: SequenceState) -> None:
        """Keep a state after the node's last item."""
        if self.at(node) is None:
            self._states[node] = state.copied()
        if len(self._states) > self._most:
            self._states.popitem(last=False)

    def drop(self, node: PrefixNode) -> None:
        """Forget the state of a node that is gone."""
        self._states.pop(node, None)

    def move_to(self, node: PrefixNode, rest: PrefixNode) -> None:
        """Give ``rest``, the end of a divided node, its state."""
        state = self._states.pop(node, None)
        if state is not None:
            self._states[rest] = state
