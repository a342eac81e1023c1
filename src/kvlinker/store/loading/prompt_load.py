"""Loads one prompt's chunks: how many layers must have arrived before it begins, and by when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvlinker.store.chunk_kv import ChunkKV, ChunkReader, LayerKV
from kvlinker.store.loading.arriving import KV, ArrivingKV
from kvlinker.store.loading.bandwidths import Bandwidths, LoadTime

LEAST_DEADLINE_SECONDS = 0.25
MOST_DEADLINE_SECONDS = 10.0
"""The least and the most seconds after which a prompt computes the chunks of which too few layers
have arrived; chosen by hand. Between them, the seconds of computing count."""

PATIENCE_SECONDS = 2.0
"""The seconds after the computation that hides the loading by which the last layers must have
arrived; chosen by hand."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Urgency:
    """The computation that loading a prompt's chunks competes with. By default nothing hides the
    loading, and loading is always worth it.

    - ``compute``: seconds of the computation that hides the loading.
    - ``prefill``: seconds of computing the chunks instead of loading them.
    - ``shares_processors``: true if the computation runs on the processors that read, so that it
      hides only waiting.
    - ``decided``: true if all chunks are to be loaded, however long a single one takes.
    - ``alone``: true if no other request is computed, so that waiting for a layer delays none.
    """

    compute: float = 0.0
    prefill: float = math.inf
    shares_processors: bool = False
    decided: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class OpenedChunk:
    """A copy of a chunk in the tier of this name, ready to be read."""

    tier: str
    reader: ChunkReader


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A chunk that is in memory as a whole, from the tier of this name."""

    tier: str
    kv: ChunkKV
    """Its KV in the resident form."""

    seconds: float
    """The seconds of reading."""

    stored: ChunkKV | None = None
    """Its KV as slower tiers keep it; None if it was in memory."""


class ChunkLoad:
    """A chunk that a prompt wants from a slower tier.

    ``begun`` gets the KV once enough layers are there to begin with, or None if the chunk is lost
    or late. ``ended`` gets the whole chunk, or None if this prompt does not get it.
    """

    def __init__(
        self, key: str, find: Callable[[Set[str]], OpenedChunk | LoadedChunk | None]
    ) -> None:
        """``find`` opens a copy in a tier that is not among those that were tried, or says that the
        chunk has come to memory meanwhile, or returns None."""
        self.key = key
        self.find = find
        self.begun: Future[KV | None] = Future()
        self.ended: Future[LoadedChunk | None] = Future()
        self.opened: OpenedChunk | None = None
        self.kv: ArrivingKV | None = None

    @property
    def waiting(self) -> bool:
        """True while the prompt still wants the missing layers."""
        return not self.ended.done() and not (self.kv is not None and self.kv.lost)

    def open(self, opened: OpenedChunk, layers: Sequence[LayerKV]) -> None:
        """Note that a copy is being read, of which these layers have arrived."""
        self.opened, reader = opened, opened.reader
        if self.kv is None:
            self.kv = ArrivingKV(
                reader.layers, tokens=reader.tokens, scores=reader.scores, states=reader.states
            )
            for layer in layers:
                self.kv.deliver(layer)

    def end(self, loaded: LoadedChunk | None) -> None:
        """Resolve both futures: the chunk has arrived, or (None) will not. Only the first call
        counts."""
        if not self.waiting:
            loaded = None
        if loaded is None and self.kv is not None:
            self.kv.give_up()
        _resolve(self.ended, loaded)
        _resolve(self.begun, None if loaded is None else loaded.kv)


class PromptLoad:
    """The chunks that one prompt loads together."""

    def __init__(
        self, chunks: Sequence[ChunkLoad], urgency: Urgency, clock: Callable[[], float]
    ) -> None:
        """``clock`` returns the time in seconds, on the scale of the deadline."""
        self.chunks = tuple(chunks)
        self.deadline = clock() + min(
            max(urgency.prefill, LEAST_DEADLINE_SECONDS), MOST_DEADLINE_SECONDS
        )
        self._clock = clock
        self._urgency = urgency
        self._rest_seconds = urgency.compute
        self.begun = False
        """True once all chunks that are there in time have enough layers."""

    @property
    def ended(self) -> bool:
        """True once no chunk is being loaded any more."""
        return all(chunk.ended.done() for chunk in self.chunks)

    def begin(self, bandwidths: Bandwidths) -> None:
        """Resolve ``begun`` of the chunks that have enough layers. With the last of them the
        deadline is a new one, since the rest must arrive soon after the computation that hides its
        loading."""
        if self.begun:
            return
        waiting = [chunk for chunk in self.chunks if chunk.waiting]
        arriving = [
            (chunk, chunk.kv, chunk.opened) for chunk in waiting if chunk.kv and chunk.opened
        ]
        if len(arriving) == len(waiting):
            load = bandwidths.time((opened.tier, opened.reader.nbytes) for _, _, opened in arriving)
            if load is not None and self._urgency.shares_processors and not load.waits:
                load = None  # the computation would wait for the processors: nothing hides it
            for chunk, kv, _ in arriving:
                if kv.delivered >= self._depth(kv.layer_count, load):
                    _resolve(chunk.begun, kv)
            self._rest_seconds = max(self._urgency.compute, 0.0 if load is None else load.seconds)
        if all(chunk.begun.done() for chunk in self.chunks):
            self.deadline = self._clock() + self._rest_seconds + PATIENCE_SECONDS
            self.begun = True

    def expire(self) -> None:
        """After the deadline, cancel the chunks that could not begin or, if all have begun, those
        that are not complete."""
        for chunk in self.chunks:
            if self.begun or not chunk.begun.done():
                chunk.end(None)

    def _depth(self, layers: int, load: LoadTime | None) -> int:
        """Return the number of layers that must have arrived before the prompt begins: all where
        nothing hides the loading, one where waiting for the next ones delays no other request, else
        as many as keep the computation from waiting."""
        if load is None:
            return layers
        if self._urgency.alone:
            return 1
        return preload_depth(
            layers, compute_seconds=self._urgency.compute, load_seconds=load.seconds
        )


def preload_depth(layers: int, *, compute_seconds: float, load_seconds: float) -> int:
    """Return the number of layers that must have arrived so that none is missing when its turn
    comes: Cache-Craft's eq. 16, L_p = (L - 1)(1 - T_prefill / T_load) + 1, at least 1 and at most
    ``layers``.

    ``compute_seconds`` is T_prefill, the computation of all layers; ``load_seconds`` is T_load,
    reading all layers.
    """
    if load_seconds <= 0:
        return 1
    hidden = min(1.0, max(0.0, compute_seconds / load_seconds))
    return min(layers, math.ceil((layers - 1) * (1 - hidden)) + 1)


def _resolve(future: Future[T], result: T) -> None:
    with suppress(InvalidStateError):
        future.set_result(result)
