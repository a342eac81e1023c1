"""A request whose order a worker fulfils."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvlinker.store import ChunkKV
from kvlinker.vllm.adapter import BoundModel
from kvlinker.vllm.protocol.messages import Begun
from kvlinker.vllm.protocol.slices import PlacedPart
from kvlinker.vllm.worker.capturing import Capture
from kvlinker.vllm.worker.comparing import Comparison
from kvlinker.vllm.worker.placing import ChunkPart

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Task:
    """``loaded``: the order's chunks by key, or None where one did not come."""

    begun: Begun
    loaded: Future[dict[str, ChunkKV] | None]
    captures: tuple[Capture, ...] = ()
    comparison: Comparison | None = None
    told_loaded: bool = False
    failed: bool = False

    def parts(self, bound: BoundModel, parts: Iterable[PlacedPart]) -> Iterator[ChunkPart]:
        """The parts' KV and where it belongs. The task has failed, and there are no more, where it is not as the order
        says."""
        for part in parts:
            kvs = self.loaded.result()
            placed = self.begun.order.placements[part.placement]
            if kvs is None:
                self.failed = True
                return
            kv = kvs[placed.key]
            if part.last > kv.tokens:
                logger.error("Chunk %s has %d tokens; %d are to be placed.", placed.key, kv.tokens, part.last)
                self.failed = True
                return
            offsets = torch.arange(part.first, part.last, device=bound.device)
            slots = bound.slots(self.begun.block_ids, offsets + placed.start)
            yield ChunkPart(kv, part.first, part.last, placed.start + part.first, offsets + placed.rotary_start, slots)

    def parts_within(self, bound: BoundModel, begin: int, end: int) -> Iterator[ChunkPart]:
        """Of the placements, what lies at positions [begin, end)."""
        placements = enumerate(self.begun.order.placements)
        within = [
            PlacedPart(index, max(placed.first, begin - placed.start), min(placed.last, end - placed.start))
            for index, placed in placements
            if placed.begin < end and placed.end > begin
        ]
        return self.parts(bound, within)
