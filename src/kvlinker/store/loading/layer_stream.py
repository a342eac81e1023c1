"""A chunk's layers while they are still being read: whoever computes takes them one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, overload

from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.types.chunk_scores import ChunkScores


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


class HeldReader:
    """``ChunkReader`` of KV that is in memory."""

    def __init__(self, kv: ChunkKV) -> None:
        self._kv = kv
        self.layers = len(kv.layers)
        self.nbytes = kv.nbytes
        self.scores = kv.scores

    def read(self, layer: int) -> LayerKV:
        return self._kv.layers[layer]

    def close(self) -> None:
        """Nothing is open."""


class LayerStream(Sequence[LayerKV]):
    """Layers in order, each delivered once by the thread that reads them. Taking one that is not there waits for it,
    at most ``patience`` seconds; after that, or once the reader has failed, it and all behind it count as lost."""

    def __init__(self, layers: int, *, patience: float, late: Callable[[], None] = lambda: None) -> None:
        """``late`` is told when somebody waited in vain."""
        self._patience = patience
        self._late = late
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
        """Layers are missing, and no further one comes."""
        return self._lost

    @property
    def delivered(self) -> int:
        """How many layers are there, from the first on."""
        return self._delivered

    def wait(self, index: int, seconds: float) -> LayerKV | None:
        """The layer once it is there, after at most so long; None where it does not come. Nothing follows from that:
        for others who read the stream."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers[index] is not None or self._lost, seconds)
            return self._layers[index]

    def deliver(self, layer: LayerKV) -> bool:
        """The next layer is there; False where nobody wants it any more."""
        with self._changed:
            if not self._lost:
                self._layers[self._delivered] = layer
                self._delivered += 1
                self._changed.notify_all()
            return not self._lost

    def lose(self) -> None:
        """No further layer will come; nothing happens where all have."""
        with self._changed:
            self._lost = self._delivered < len(self._layers)
            self._changed.notify_all()

    def _awaited(self, index: int) -> LayerKV:
        with self._changed:
            self._changed.wait_for(lambda: self._layers[index] is not None or self._lost, self._patience)
            layer = self._layers[index]
            in_vain = layer is None and not self._lost
            self._lost |= layer is None
        if in_vain:
            self._late()
        if layer is None:
            raise LayerLostError(f"layer {index} did not come")
        return layer
