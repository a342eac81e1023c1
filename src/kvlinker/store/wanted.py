"""What the store asks of the layer loader, and what it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.layer_stream import ChunkReader


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
