"""The form of chunks in the first tier, and the kind of their memory."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.store.chunk_kv import ChunkKV, LayerKV, ResidentForm, changed
from kvlinker.store.memory.pinned import PinnedChunk


class Residence:
    """Converts chunks from the form in which they were computed to the first tier's, and back."""

    def __init__(
        self, form: ResidentForm | None = None, pins: Callable[[int], PinnedChunk] | None = None
    ) -> None:
        """``pins`` allocates the memory of a chunk by its number of layers, where a device copies
        from it."""
        self._form = form or ResidentForm()
        self._pins = pins

    def resident(self, kv: ChunkKV) -> ChunkKV:
        """Return a whole chunk as the first tier keeps it."""
        return changed(kv, self.of_layers(len(kv.layers)))

    def of_layers(self, layers: int) -> Callable[[int, LayerKV], LayerKV]:
        """Return a function of a layer and its index that returns the first tier's form, for one
        chunk of ``layers`` layers. It is called in their order."""
        form = self._form
        if self._pins is None:
            return form.resident
        memory = self._pins(layers)
        return lambda index, layer: memory.take(form.resident(index, layer))

    def computed(self, kv: ChunkKV) -> ChunkKV:
        """Return the first tier's form as it was computed, with rounding errors."""
        return changed(kv, self._form.computed)
