"""A chunk's layers while they are still being read: whoever computes takes them one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol, overload

from kvlinker.chunk_scores import ChunkScores
from kvlinker.store.chunk_kv import LayerKV


class LayerLostError(Exception):
    """A layer will not come, or not in time: the chunk has to be computed."""


class ChunkReader(Protocol):
    """An opened copy of a chunk, whose header has been read and verified. One thread at a time."""

    @property
    def layers(self) -> int:
        """How many it has."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes to be read for all layers."""
        ...

    @property
    def scores(self) -> ChunkScores | None: ...

    def read(self, layer: int) -> LayerKV:
        """Read, verify and decode one layer. Raises LayerLostError."""
        ...

    def close(self) -> None:
        """Give up the copy. Idempotent."""
        ...


class LayerStream(Sequence[LayerKV]):
    """Layers in order, each delivered once by the thread that reads them. Taking one that is not there waits for it,
    at most ``patience`` seconds; after that, or once the reader has failed, all layers count as lost."""

    def __init__(self, layers: int, *, patience: float) -> None:
        self._patience = patience
        self._layers: list[LayerKV | None] = [None] * layers
        self._delivered = 0
        self._lost = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerKV: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerKV]: ...

    def __getitem__(self, index: int | slice) -> LayerKV | Sequence[LayerKV]:
        """Raises LayerLostError for a layer that does not come."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        layer = self._layers[index]
        return self._awaited(range(len(self))[index]) if layer is None else layer

    @property
    def lost(self) -> bool:
        """No further layer comes."""
        return self._lost

    @property
    def delivered(self) -> int:
        """How many layers are there, from the first on."""
        return self._delivered

    def deliver(self, layer: LayerKV) -> None:
        """The next layer is there."""
        with self._changed:
            self._layers[self._delivered] = layer
            self._delivered += 1
            self._changed.notify_all()

    def lose(self) -> None:
        """The next layer will not come."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _awaited(self, index: int) -> LayerKV:
        deadline = time.monotonic() + self._patience
        with self._changed:
            while self._layers[index] is None and not self._lost:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    self._lost = self._layers[index] is None
            layer = self._layers[index]
            if layer is None:
                self._changed.notify_all()
                raise LayerLostError(f"layer {index} did not come")
            return layer
