"""A device that a CPU passes for: what is copied to it is there only once somebody has waited."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlinker.store.memory.lane import Arrival, CopyLane


class FakeDevice(CopyLane):
    """A lane to a device whose memory holds nothing (NaN) until the event of a copy is waited for.

    Whoever reads too early reads NaN; a copy whose source has been written to meanwhile brings
    something else than it should.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        """What was launched and waited for, in order: ``launch 3``, ``wait 3``."""

        self._rooms: list[Tensor] = []  # never freed, so that no other has their address
        self._pending: list[FakeArrival] = []
        self._launched = 0

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(address == room.untyped_storage().data_ptr() for room in self._rooms)

    def room_like(self, tensor: Tensor) -> Tensor:
        self._rooms.append(torch.full(tensor.shape, float("nan"), dtype=tensor.dtype))
        return self._rooms[-1]

    def launch(self, work: Callable[[], object], keeping: object) -> FakeArrival:
        arrival = FakeArrival(self, self._launched, work)
        self._launched += 1
        self._pending.append(arrival)
        self.log.append(f"launch {arrival.number}")
        return arrival

    def forget(self) -> None:
        """Begin the log anew; what is launched is counted from 0 again."""
        self.log.clear()
        self._pending.clear()
        self._launched = 0

    def reach(self, arrival: FakeArrival) -> None:
        """Make all copies up to this one."""
        self.log.append(f"wait {arrival.number}")
        while self._pending and self._pending[0].number <= arrival.number:
            self._pending.pop(0).work()


class FakeArrival(Arrival):
    def __init__(self, device: FakeDevice, number: int, work: Callable[[], object]) -> None:
        self.number = number
        self.work = work
        self._lane = device

    def wait(self) -> None:
        self._lane.reach(self)

    def finish(self) -> None:
        self._lane.reach(self)
