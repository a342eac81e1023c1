"""Chunks that several requests load at the same time are read once: the later ones take the first one's layers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.loading.layer_stream import ChunkReader, LayerLostError, LayerStream
from kvlinker.store.loading.wanted import Opened


class JoinedReader:
    """``ChunkReader`` of what another thread is reading into ``stream``.

    What becomes of the other's request is not this one's affair: where layers do not come any more, or one takes too
    long, a copy of its own takes over.
    """

    def __init__(
        self, stream: LayerStream, reader: ChunkReader, reopen: Callable[[], ChunkReader | None], *, patience: float
    ) -> None:
        """``reader`` is the other's, which is only asked what it reads. ``patience``: seconds to wait for a layer."""
        self.layers, self.nbytes, self.scores = reader.layers, reader.nbytes, reader.scores
        self._stream = stream
        self._reopen = reopen
        self._patience = patience
        self._own: ChunkReader | None = None

    def read(self, layer: int) -> LayerKV:
        if self._own is None:
            delivered = self._stream.wait(layer, self._patience)
            if delivered is not None:
                return delivered
            self._own = self._reopen()
            if self._own is None:
                raise LayerLostError("what another request read did not come, and there is no other copy")
        return self._own.read(layer)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


class UnderWay:
    """The chunks that are being read, by key. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, tuple[LayerStream, Opened]] = {}

    def begin(self, key: str, stream: LayerStream, opened: Opened) -> None:
        with self._lock:
            self._streams[key] = stream, opened

    def end(self, key: str, stream: LayerStream) -> None:
        """Nobody can join the stream any more."""
        with self._lock:
            if key in self._streams and self._streams[key][0] is stream:
                del self._streams[key]

    def join(self, key: str, reopen: Callable[[], ChunkReader | None], *, patience: float) -> Opened | None:
        """A reader of the chunk that is being read, unless none is, or nobody wants it any more."""
        with self._lock:
            stream, opened = self._streams.get(key, (None, None))
        if stream is None or opened is None or stream.lost:
            return None
        return Opened(opened.tier, JoinedReader(stream, opened.reader, reopen, patience=patience))
