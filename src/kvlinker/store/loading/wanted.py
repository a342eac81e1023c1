"""What the store asks of the layer loader, and what it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil

from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.layer_stream import ChunkReader


@dataclass(frozen=True, slots=True)
class Urgency:
    """What loading competes with, in seconds: ``compute``, the computation that hides it; ``prefill``, computing the
    chunks instead of loading them. ``shares_processors``: the computation runs where reading does, and hides only what
    reading waits. ``decided``: all of them are to be loaded, whatever a single one takes. As it stands: nothing hides
    it, and nothing is known to be quicker."""

    compute: float = 0.0
    prefill: float = math.inf
    shares_processors: bool = False
    decided: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A copy of a chunk in the tier of this name."""

    tier: str
    reader: ChunkReader


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk whose layers are all there, after ``seconds`` of reading."""

    tier: str
    kv: ChunkKV
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The chunk of this key, which is believed to lie in a slower tier.

    ``open`` finds a copy, or none, or that it has come to memory meanwhile. ``ended`` is told once, when all is there,
    or with None, when it will not be. ``future`` has the KV once enough layers are there to begin with, or None when it
    is lost, or late.
    """

    key: str
    open: Callable[[], Opened | Loaded | None]
    ended: Callable[[Loaded | None], None]
    future: Future[ChunkKV | None] = field(default_factory=Future)

    def resolve(self, kv: ChunkKV | None) -> None:
        """Unless somebody did before."""
        with suppress(InvalidStateError):
            self.future.set_result(kv)


def preload_depth(layers: int, *, compute_seconds: float, load_seconds: float) -> int:
    """L_p = (L - 1)(1 - T_prefill / T_load) + 1: layers to wait for, so that none is missing when its turn comes.

    ``compute_seconds``: T_prefill, all layers' computation. ``load_seconds``: T_load, reading all layers. At least 1,
    at most ``layers``.
    """
    if load_seconds <= 0:
        return 1
    hidden = min(1.0, max(0.0, compute_seconds / load_seconds))
    return min(layers, ceil((layers - 1) * (1 - hidden)) + 1)
