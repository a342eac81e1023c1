"""How much of each chunk a request took as it was cached: what says which chunks are worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.chunks import Chunk
from kvlinker.linking.explanation import layer_masks
from kvlinker.linking.plan import LinkPlan


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """``recomputed``: the share of the chunk's tokens that were computed again, mean over the layers."""

    chunk: Chunk
    recomputed: float


def chunk_uses(
    plan: LinkPlan, layers: int, dropped: Sequence[tuple[int, NDArray[np.int64]]] = ()
) -> tuple[ChunkUse, ...]:
    """A use for each placement, in order; ``dropped`` between the layers: (first layer without them, positions)."""
    computed = np.mean(layer_masks(plan, layers if dropped else 1, dropped), axis=0)
    return tuple(
        ChunkUse(placement.chunk, float(computed[placement.start : placement.start + len(placement.chunk)].mean()))
        for placement in plan.placements
    )
