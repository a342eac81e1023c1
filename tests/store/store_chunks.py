"""What the store's tests share: small chunks by number, bitwise comparison, and a listener that
remembers."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvlinker.base.events import Event, Events
from kvlinker.settings import Settings, load_settings
from kvlinker.store import ChunkKV, LayerKV
from kvlinker.store.loading.arriving import ArrivingKV
from tests.waiting import PATIENCE

E = TypeVar("E", bound=Event)


def sized(folder: Path, host_bytes: int, disk_bytes: int, **others: Any) -> Settings:
    """Return settings of a state directory whose store has these budgets."""
    return load_settings(state_dir=folder, host_memory=host_bytes, disk_space=disk_bytes, **others)


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chunk_kv(
    number: int,
    *,
    tokens: int = 3,
    layers: int = 2,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> ChunkKV:
    """KV of random bits (NaNs and all) that depend on the number only; key and value differ in
    head_dim."""
    generator = torch.Generator().manual_seed(number)

    def tensor(head_dim: int) -> torch.Tensor:
        shape = (kv_heads, tokens, head_dim * dtype.itemsize)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)

    return ChunkKV(tuple(LayerKV(tensor(4), tensor(6)) for _ in range(layers)))


def same_kv(left: ChunkKV | None, right: ChunkKV) -> bool:
    """Equal dtypes, shapes and bits. ``left`` must have been found."""
    assert left is not None
    pairs = [
        (a, b)
        for x, y in zip(left.layers, right.layers, strict=True)
        for a, b in zip(x.parts, y.parts, strict=True)
    ]
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


class Recorder:
    """Remembers every event that is published to ``events``."""

    def __init__(self) -> None:
        self.events = Events()
        self.seen: list[Event] = []
        self._own: list[Event] = []
        self._thread = threading.current_thread()
        self.events.subscribe(self._note)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def own(self, kind: type[E]) -> list[E]:
        """Those that came from calls in the test's own thread."""
        return [event for event in self._own if isinstance(event, kind)]

    def _note(self, event: Event) -> None:
        self.seen.append(event)
        if threading.current_thread() is self._thread:
            self._own.append(event)


def run_threads(*targets) -> None:
    """Run the callables at the same time; the first exception of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(target) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def awaited(kv: ArrivingKV, index: int, seconds: float = 10.0) -> LayerKV | None:
    """The layer, once it is there; None where it is lost, or does not come within so many
    seconds."""
    changed = threading.Event()
    kv.subscribe(changed.set)
    deadline = time.monotonic() + seconds
    while kv.layer(index) is None and not kv.lost and (left := deadline - time.monotonic()) > 0:
        changed.wait(left)
        changed.clear()
    return kv.layer(index)
