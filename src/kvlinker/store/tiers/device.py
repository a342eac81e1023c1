"""Keeps copies of chunks in the computing device's own memory: the tier before all others."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cached_property

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.events import Events
from kvlinker.base.types.chunks import Eviction
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.eviction import NextUses
from kvlinker.store.lazy_torch import torch
from kvlinker.store.memory.lane import CopyLane, lane_to
from kvlinker.store.throttle import Rest, no_rest
from kvlinker.store.tiers.base import Tier
from kvlinker.store.tiers.configured import ConfiguredTier, register
from kvlinker.store.tiers.host import HostTier

logger = logging.getLogger(__name__)

FREE_SHARE = 0.1
"""The share of a CUDA device's free memory that the tier takes by default; chosen by hand."""


class DeviceTier(HostTier):
    """A host tier whose chunks lie on ``device``.

    It keeps the chunks that are used, so that they are attended to without a copy over the bus; the
    store puts nothing else here. Each of its chunks was in host memory when it came, so that
    evicting it loses nothing that the host still has.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device,
        events: Events,
        *,
        eviction: Eviction = "lru",
        next_uses: NextUses | None = None,
    ) -> None:
        super().__init__(
            budget_bytes, events, name="device", eviction=eviction, next_uses=next_uses
        )
        self._device = device

    @cached_property
    def _lane(self) -> CopyLane | None:
        return lane_to(self._device)

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        copied = self.copied(kv)
        return copied is not None and super().put(key, copied)

    def copied(self, kv: ChunkKV) -> ChunkKV | None:
        """Return the KV on the device, itself where it is there already; None if there is no room
        for it."""
        if kv.nbytes > self.budget_bytes:
            return None
        try:
            layers = self._copy_layers(kv.layers)
        except torch.OutOfMemoryError as error:
            logger.warning("A chunk stays out of the memory of %s: %s", self._device, error)
            return None
        return replace(kv, layers=layers)

    def _copy_layers(self, layers: Sequence[LayerKV]) -> tuple[LayerKV, ...]:
        """Return the layers on the device, once they are there."""
        if self._lane is None or all(self._lane.holds(layer.key) for layer in layers):
            return tuple(layer.to(self._device) for layer in layers)
        copies, arrival = self._lane.copies(layers)
        arrival.finish()
        return copies

    def set_pinned(self, keys: Set[str]) -> None:
        """Do nothing: slower tiers keep pinned chunks."""

    def _accepts(self, key: str, nbytes: int) -> bool:
        # a chunk that does not fit is copied from the host's memory for each step
        return self._index.fits(nbytes)


@register
class ConfiguredDevice(ConfiguredTier):
    """Keeps copies on the device that a model runs on, where it takes chunks from the store.

    Without a budget, the tier takes FREE_SHARE of what is free on a CUDA device when it is opened,
    and nothing elsewhere.
    """

    name = "device"
    rank = 0
    settings = ("device_memory", "eviction")

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes. Raises InvalidRequestError for one where the device's memory is the
        host's."""
        device, budget_bytes = self.setup.device, self.setup.settings.device_memory
        if device is None:
            return 0
        if budget_bytes is None:
            return (
                int(torch.cuda.mem_get_info(device)[0] * FREE_SHARE) if device.type == "cuda" else 0
            )
        if budget_bytes and device.type == "cpu":
            raise InvalidRequestError(
                f"device_memory is {budget_bytes:,} bytes, but the model runs on the CPU, whose"
                " memory is the host's. Leave device_memory out, and set host_memory.",
                param="device_memory",
            )
        return budget_bytes

    def open(self) -> Tier:
        device = self.setup.device
        assert device is not None  # else it is left out
        return DeviceTier(
            self.budget_bytes,
            device,
            self.setup.events,
            eviction=self.setup.settings.eviction,
            next_uses=self.setup.next_uses,
        )
