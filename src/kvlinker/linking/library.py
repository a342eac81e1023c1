"""Which KV there is for a chunk: variants that were computed behind different chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlinker.chunk_scores import Contextualization
from kvlinker.chunks import Chunk


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk whose KV was computed behind ``chunk.prefix``, and how it depends on the chunks in there."""

    chunk: Chunk
    contextualization: Contextualization


class Library(Protocol):
    """The variants that are stored."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        """Variants with the same tokens as ``chunk``, besides itself."""
        ...


class NoVariants:
    """A ``Library`` of nothing."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        return ()
