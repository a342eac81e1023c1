"""Holds a chunk's KV while it is still being read: the loader delivers its layers in order, the
engine takes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.store.chunk_kv import ChunkKV, ChunkState, LayerKV

logger = logging.getLogger(__name__)


class ArrivingKV:
    """A chunk's KV whose layers are still being read, in order, for one request.

    One thread at a time delivers; any thread may look or cancel. A layer that is there stays.
    """

    def __init__(
        self,
        layer_count: int,
        *,
        tokens: int,
        scores: ChunkScores | None = None,
        states: tuple[ChunkState, ...] = (),
    ) -> None:
        """Begin without a layer."""
        self.layer_count = layer_count
        self.tokens = tokens
        self.scores = scores
        self.states = states
        self._layers: list[LayerKV] = []
        self._given_up = False
        self._lock = threading.Lock()
        self._subscribers: dict[Callable[[], None], None] = {}  # a set that keeps the order

    @property
    def delivered(self) -> int:
        """The number of layers that are there, from the first on."""
        return len(self._layers)

    @property
    def complete(self) -> bool:
        """True once all layers have arrived."""
        return len(self._layers) == self.layer_count

    @property
    def lost(self) -> bool:
        """True if layers are missing and no further one will arrive."""
        return self._given_up and not self.complete

    def layer(self, index: int) -> LayerKV | None:
        """Return the layer, or None while it has not arrived. Never waits. Raises IndexError for an
        index that the chunk does not have."""
        if not 0 <= index < self.layer_count:
            raise IndexError(f"layer {index} of a chunk that has {self.layer_count}")
        return self._layers[index] if index < len(self._layers) else None

    def deliver(self, layer: LayerKV) -> bool:
        """Add the next layer and notify the subscribers; False if it is no longer wanted."""
        with self._lock:
            if self._given_up:
                return False
            self._layers.append(layer)
        self._tell()
        return True

    def give_up(self) -> None:
        """Expect no further layer, because it cannot arrive or is not wanted, and notify the
        subscribers. Idempotent; does nothing if all layers are there."""
        with self._lock:
            if self._given_up or self.complete:
                return
            self._given_up = True
        self._tell()

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each further layer, and when the rest is lost, in the thread that
        delivers or cancels. Earlier changes are not reported: check the state after subscribing.
        Idempotent: a callable that is equal to an earlier one is called once a change."""
        self._subscribers[changed] = None

    def _tell(self) -> None:
        for changed in tuple(self._subscribers):
            try:
                changed()
            except Exception:
                logger.exception("A listener of a chunk's arrival failed.")


KV = ChunkKV | ArrivingKV
"""The KV of a chunk: complete, or still arriving."""
