"""Places chunks concurrently with the computation, which waits for each layer when it reaches
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvlinker.engines.vllm.adapter import AttentionLayer
from kvlinker.engines.vllm.worker.layers import GroupParts, Launch
from kvlinker.store.memory.lane import Arrival, CopyLane

Launches = Callable[[GroupParts], Iterator[Launch]]
"""Yields the function that places parts in all layers; the first layers come first."""


class LanePlacing:
    """Places parts on a lane of their own, where there is one.

    Code that computes over them calls ``wait_for`` before it writes to or reads from a layer's
    cache, and ``wait_for_all`` before other code does.
    """

    def __init__(
        self, lane: CopyLane | None, layers: Sequence[AttentionLayer], launches: Launches
    ) -> None:
        self._lane = lane
        self._names = [layer.name for layer in layers]
        self._launches = launches
        self._under_way: dict[str, Arrival] = {}

    def place(self, parts: GroupParts) -> None:
        """Write all parts into the KV cache, sooner or later, after all parts that were placed
        before."""
        for layers, work in self._launches(parts):
            if self._lane is None:
                work()
            else:
                arrival = self._lane.launch(work, keeping=(work, parts))
                self._under_way.update(dict.fromkeys([self._names[n] for n in layers], arrival))

    def wait_for(self, name: str) -> None:
        """Have later computations find all parts in the layer of this name."""
        arrival = self._under_way.pop(name, None)
        if arrival is not None:
            arrival.wait()

    def wait_for_all(self) -> None:
        """Have later computations find all parts in all layers."""
        for name in list(self._under_way):
            self.wait_for(name)
