"""The form of chunks in the first tier, and the kind of their memory."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.store.chunk_kv import ChunkKV, LayerKV, ResidentForm, changed
from kvlinker.store.memory.pinned import PinnedChunk


class Residence:
    """Makes of chunks, as they were computed, what the first tier keeps, and back."""

    def __init__(
        self, form: ResidentForm | None = None, pins: Callable[[int], PinnedChunk] | None = None
    ) -> None:
        """``pins`` makes the memory of a chunk of so many layers, where a device copies from it."""
        self._form = form or ResidentForm()
        self._pins = pins

    def resident(self, kv: ChunkKV) -> ChunkKV:
        """Return a whole chunk as the first tier keeps it."""
        return changed(kv, self.of_layers(len(kv.layers)))

    def of_layers(self, layers: int) -> Callable[[int, LayerKV], LayerKV]:
        """Return what makes a layer, given its index, what the first tier keeps, for one chunk of
        so many ``layers``, which come in order."""
        form = self._form
        if self._pins is None:
            return form.resident
        memory = self._pins(layers)
        return lambda index, layer: memory.take(form.resident(index, layer))

    def computed(self, kv: ChunkKV) -> ChunkKV:
        """Return what the first tier keeps as it was computed, but for rounding."""
        return changed(kv, self._form.computed)
