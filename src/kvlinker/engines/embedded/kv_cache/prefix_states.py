"""Keeps states at the ends of nodes of the tree of prefixes, for models whose layers keep one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvlinker.engines.embedded.kv_cache.prefix_node import PrefixNode
from kvlinker.engines.embedded.kv_cache.states import SequenceState


class PrefixStates:
    """The states that were used last, a limited number. A node that is given up loses its own."""

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

    def furthest(
        self, parts: Sequence[tuple[PrefixNode, int]]
    ) -> tuple[int, list[tuple[PrefixNode, int]]]:
        """Return where the last state stands in nodes from the root on, of each of which so many
        items are meant, and as many of these as end there: 0 and the root without any."""
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

    def pass_on(self, node: PrefixNode, rest: PrefixNode) -> None:
        """Have ``rest``, the end of a divided node, keep its state."""
        state = self._states.pop(node, None)
        if state is not None:
            self._states[rest] = state
