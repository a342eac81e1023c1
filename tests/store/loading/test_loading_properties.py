"""Whatever tiers, prompts and those who compute do, in any order: nobody hangs, and nobody gets a
wrong layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Set
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.store import ChunkKV, LayerKV
from kvlinker.store.chunk_kv import LayerLostError
from kvlinker.store.loading import loader as module
from kvlinker.store.loading import prompt_load
from kvlinker.store.loading.arriving import KV, ArrivingKV
from kvlinker.store.loading.loader import LayerLoader
from kvlinker.store.loading.prompt_load import ChunkLoad, LoadedChunk, OpenedChunk, Urgency
from tests.properties import examples
from tests.store.store_chunks import awaited, chunk_kv

TIMEOUT = 20.0
LAYERS = 4
CHUNKS = [chunk_kv(number, layers=LAYERS) for number in range(3)]


@dataclass(frozen=True)
class Copy:
    """How a copy behaves: the layer at which reading fails or hangs, if any; -1 is its opening."""

    fails: int | None = None
    hangs: int | None = None


@dataclass
class Medium:
    """Two tiers with copies of the chunks. ``released`` lets go of what hangs."""

    copies: dict[tuple[str, int], Copy]
    released: threading.Event = field(default_factory=threading.Event)
    opened: list[Reader] = field(default_factory=list)

    def find(self, number: int, tried: Set[str]) -> OpenedChunk | LoadedChunk | None:
        for tier in ("near", "far"):
            copy = self.copies.get((tier, number))
            if copy is not None and tier not in tried:
                self.behave(copy, -1)
                self.opened.append(Reader(self, copy, CHUNKS[number]))
                return OpenedChunk(tier, self.opened[-1])
        return None

    def behave(self, copy: Copy, layer: int) -> None:
        if copy.hangs == layer:
            assert self.released.wait(TIMEOUT)
        if copy.fails == layer:
            raise LayerLostError("as the test wants")


class Reader:
    def __init__(self, medium: Medium, copy: Copy, kv: ChunkKV) -> None:
        self._medium, self._copy, self._kv = medium, copy, kv
        self.layers, self.tokens, self.nbytes, self.scores = LAYERS, kv.tokens, kv.nbytes, None
        self.contexts = 1
        self.states = ()
        self.closed = False
        self._reading = threading.Lock()

    def read(self, layer: int) -> LayerKV:
        assert self._reading.acquire(blocking=False), "two threads read at once"
        try:
            assert not self.closed
            time.sleep(0.0005)
            self._medium.behave(self._copy, layer)
            return self._kv.layers[layer]
        finally:
            self._reading.release()

    def close(self) -> None:
        self.closed = True


layer_numbers = st.none() | st.integers(-1, LAYERS - 1)
copies = st.dictionaries(
    st.tuples(st.sampled_from(["near", "far"]), st.integers(0, 2)),
    st.builds(Copy, fails=layer_numbers, hangs=st.none() | st.none() | st.integers(-1, LAYERS - 1)),
)
prompts = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.sampled_from(
        [
            Urgency(),
            Urgency(0.02, 0.02),
            Urgency(1e3, 1e3),
            Urgency(1e3, 1e3, shares_processors=True),
        ]
    ),
    st.booleans(),
)
actions = st.lists(
    st.tuples(st.just("load"), prompts)
    | st.tuples(st.sampled_from(["give up", "rest", "close"]), st.none())
)


@examples(60, core=4)
@given(copies=copies, actions=actions)
def test_nobody_hangs_and_nobody_gets_a_wrong_layer(
    copies: dict[tuple[str, int], Copy],
    actions: list[tuple[str, tuple[list[int], Urgency, bool] | None]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STALL_SECONDS", 0.05)
        patch.setattr(prompt_load, "LEAST_DEADLINE_SECONDS", 0.02)
        patch.setattr(prompt_load, "MOST_DEADLINE_SECONDS", 0.3)
        medium, loader = Medium(copies), LayerLoader()
        loader.bandwidths.note("near", 1 << 40, 1.0)
        wanted: list[tuple[int, ChunkLoad]] = []
        for action, prompt in actions:
            if prompt is not None:
                numbers, urgency, ahead = prompt
                chunks = [
                    ChunkLoad(str(number), partial(medium.find, number)) for number in numbers
                ]
                loader.load(chunks, urgency, ahead=ahead)
                wanted += zip(numbers, chunks, strict=True)
            elif action == "give up":
                for _, chunk in wanted:
                    if chunk.kv is not None:
                        chunk.kv.give_up()
                        break
            elif action == "rest":
                time.sleep(0.005)
            else:
                loader.close()
        for number, chunk in wanted:
            check(CHUNKS[number], chunk.begun.result(timeout=TIMEOUT))
            loaded = chunk.ended.result(timeout=TIMEOUT)
            if loaded is not None:
                check(CHUNKS[number], loaded.kv)
                assert len(loaded.kv.layers) == LAYERS
        medium.released.set()
        loader.close()
        deadline = time.monotonic() + TIMEOUT
        while not all(
            reader.closed for reader in medium.opened
        ):  # those that hung, soon after they return
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert not loader._prompts
        assert not loader._readings


def check(truth: ChunkKV, kv: KV | None) -> None:
    """Every layer that comes is the chunk's own, and none is waited for in vain for long."""
    if isinstance(kv, ArrivingKV):
        layers = [awaited(kv, index, TIMEOUT) for index in range(LAYERS)]
        assert kv.complete or kv.lost
        assert layers == [*truth.layers[: kv.delivered], *[None] * (LAYERS - kv.delivered)]
    elif kv is not None:
        assert kv.layers == truth.layers
