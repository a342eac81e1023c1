"""A tier's reader of one of its copies: what goes wrong is the tier's to deal with."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.store.chunk_file import EncodedChunk
from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.layer_stream import LayerLostError


class TierReader:
    """``ChunkReader`` of an encoded chunk in a tier."""

    def __init__(
        self, chunk: EncodedChunk, *, failed: Callable[[Exception], object], close: Callable[[], None] = lambda: None
    ) -> None:
        """``failed`` takes what reading raised, and decides what becomes of the copy."""
        self._chunk = chunk
        self._failed = failed
        self._close = close
        self.layers = chunk.layers
        self.nbytes = chunk.nbytes
        self.scores = chunk.scores

    def read(self, layer: int) -> LayerKV:
        try:
            return self._chunk.read(layer)
        except LayerLostError:
            raise
        except Exception as error:
            self._failed(error)
            raise LayerLostError(str(error)) from error

    def close(self) -> None:
        self._close()
