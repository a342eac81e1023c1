"""Copies from a device to the host's memory, which the device makes while its caller goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlinker.store.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of the host that the device can copy to."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type != "cpu")


def copy_to_host(room: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``room``, which has it only once ``finish_copies`` was called. Until then,
    neither may be written to but by what the same thread computes later."""
    room.copy_(source, non_blocking=True)


def finish_copies(device: torch.device) -> None:
    """Return when all copies from the device that the calling thread has begun are made."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
