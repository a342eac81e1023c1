"""Copies to a device on a separate stream: they run concurrently with its computations, which wait
for the event after those that they need."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Arrival:
    """A point in a lane: all that was launched up to it."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Delay the calling thread's next computations on the device until the point is reached.
        The thread itself does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        """Return when the point is reached."""
        self._event.synchronize()


class CopyLane:
    """A queue of copies to a CUDA device, in which one follows the other. Any thread may call the
    methods.

    Finished copies are found when the next work is launched: until then the lane keeps their
    memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._running: deque[tuple[torch.cuda.Event, object]] = deque()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in the device's memory."""
        return tensor.device == self._device

    def room_like(self, tensor: Tensor) -> Tensor:
        """Return memory of the device with the tensor's shape, strides as if it were contiguous,
        with undefined contents. Later computations of the calling thread may use it again."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)

    def launch(self, work: Callable[[], object], keeping: object) -> Arrival:
        """Launch what ``work`` copies, after all that the calling thread has computed so far, which
        may still use the memory that is written to. ``keeping`` is everything that the copies read
        and write: it is kept until they are made, even if nobody waits for them."""
        with self._lock:
            while self._running and self._running[0][0].query():  # type: ignore[no-untyped-call]
                self._running.popleft()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(self._stream):
                    work()
            finally:  # a part of it may have been launched
                event = self._stream.record_event()
                self._running.append((event, keeping))
        return Arrival(self._device, event)

    def copies(self, layers: Sequence[LayerKV]) -> tuple[tuple[LayerKV, ...], Arrival]:
        """Begin to copy the layers, which lie in the host's memory, and return where they will be,
        and when they are there. Keys and values that lie side by side will do so there."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def room_for(part: Tensor) -> Tensor:
            room = self.room_like(part)
            pairs.append((room, part))
            return room

        copies = tuple(layer.moved(room_for) for layer in layers)

        def work() -> None:
            for room, source in pairs:
                room.copy_(source, non_blocking=True)

        return copies, self.launch(work, keeping=pairs)


def lane_to(device: torch.device) -> CopyLane | None:
    """Return a new lane to the device; None if its memory is the host's, or it has no such
    streams."""
    return CopyLane(device) if device.type == "cuda" else None
