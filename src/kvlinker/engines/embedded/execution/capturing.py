"""Collects KV, keys without rotary embedding, while a sequence is computed: of chunks in it, with
the effect of their tokens on states, or of the answer at its end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.embedded.model.anatomy import Anatomy, keeping
from kvlinker.engines.embedded.model.states.kept_states import FIRST_TOKENS, Edges, edges_of
from kvlinker.engines.embedded.model.states.rules import Effect, Gates, Mixed, RuleCall
from kvlinker.store.chunk_kv import ChunkKV, ChunkState, LayerKV
from kvlinker.store.memory.to_host import copy_to_host, finish_copies, host_room


class Recorder(Protocol):
    """Takes the KV of runs, layer by layer."""

    def record(self, layer: int, start: int, kv: LayerKV) -> None:
        """Keep one run's ``kv``, un-rotated, from position ``start`` on, in this layer of those
        that keep any."""
        ...


class Capture:
    """Collects the KV of chunks, keys without rotary embedding, and their tokens' effect on
    states."""

    def __init__(
        self,
        anatomy: Anatomy,
        spans: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype,
        scores: ScoreCollector | None = None,
        first_tokens: int = FIRST_TOKENS,
        keeps_inner: bool = True,
    ) -> None:
        """``spans`` are the positions [start, end) of the chunks. ``scores`` collects theirs, in
        the same order. Layers with a state keep a chunk's ``first_tokens`` one by one, and the
        inner ones, too, or only what these do together."""
        self._anatomy = anatomy
        self._spans = tuple(spans)
        self._dtype = dtype
        self._device = torch.device("cpu")
        self._first_tokens = first_tokens
        self._keeps_inner = keeps_inner
        self.scores = scores

    @cached_property
    def _chunks(self) -> tuple[tuple[LayerKV, ...], ...]:
        """The KV per chunk and layer. It is allocated when the sequence's turn comes, not while it
        waits."""
        return tuple(
            tuple(
                LayerKV.of_parts(
                    [
                        host_room((heads, end - start, dim), self._dtype, self._device)
                        for heads, dim in shape.parts
                    ]
                )
                for shape in keeping(self._anatomy.layers)
            )
            for start, end in self._spans
        )

    @cached_property
    def _states(self) -> tuple[tuple[StateCapture, ...], ...]:
        """The collected data per chunk and layer with a state."""
        return tuple(
            tuple(
                StateCapture(
                    edges_of(self._anatomy, end - start, self._first_tokens),
                    self._dtype,
                    keeps_inner=self._keeps_inner,
                )
                for _ in self._anatomy.recurrences
            )
            for start, end in self._spans
        )

    def record(self, layer: int, start: int, kv: LayerKV) -> None:
        self._device = kv.key.device
        for (first, last), chunk in zip(self._spans, self._chunks, strict=True):
            begin, end = max(start, first), min(start + kv.key.shape[1], last)
            if begin < end:
                rows, columns = slice(begin - start, end - start), slice(begin - first, end - first)
                for kept, part in zip(chunk[layer].parts, kv.parts, strict=True):
                    copy_to_host(kept[:, columns], part[:, rows])

    def record_state(
        self,
        layer: int,
        start: int,
        entering: Tensor,
        call: RuleCall | None = None,
        mixed: Mixed = (),
        gates: Gates = (),
    ) -> None:
        """Keep the effect of one run of tokens from position ``start`` on, on the state of a layer:
        ``entering`` [channels, run] is convolved, and ``mixed`` and ``gates`` [1, run, …] are the
        arguments of the rule after that. Does nothing if the KV alone is collected."""
        for (first, last), chunk in zip(self._spans, self._states, strict=True):
            begin, end = max(start, first), min(start + entering.shape[1], last)
            if chunk and begin < end:
                rows = slice(begin - start, end - start)
                chunk[layer].record(
                    begin - first,
                    entering[:, rows].T,
                    call,
                    tuple(part[:, rows] for part in mixed),
                    tuple(part[:, rows] for part in gates),
                )

    def finish(self) -> tuple[ChunkKV, ...]:
        """Return the KV and effects of every chunk, once all layers have seen all tokens."""
        finish_copies(self._device)
        scores = [None] * len(self._spans) if self.scores is None else self.scores.finish()
        return tuple(
            ChunkKV(layers, found, tuple(state.finish() for state in states), end - start)
            for (start, end), layers, found, states in zip(
                self._spans, self._chunks, scores, self._states, strict=True
            )
        )


class StateCapture:
    """Collects the effect of one chunk's tokens on the state of one layer."""

    def __init__(self, edges: Edges, dtype: torch.dtype, *, keeps_inner: bool) -> None:
        first, last, tokens, context = edges
        self._mixed_of = ((0, first), (context, tokens))
        self._gates_of = ((0, first), (last, tokens))
        self._inner = first, last
        self._dtype = dtype
        self._keeps_inner = keeps_inner
        self._entering: list[Tensor] = []
        self._gates: list[Gates] = []
        self._effect: Effect | None = None
        self._inner_entering: list[tuple[Tensor, ...]] = []

    def record(
        self, begin: int, entering: Tensor, call: RuleCall | None, mixed: Mixed, gates: Gates
    ) -> None:
        """Take in the chunk's tokens from ``begin`` on: what enters of them, [run, channels], and
        the rule's arguments [1, run, …]."""
        end = begin + len(entering)
        for rows in _rows(begin, end, self._mixed_of):
            self._entering.append(self._copied(entering[rows]))
        for rows in _rows(begin, end, self._gates_of):
            self._gates.append(tuple(gate[0, rows].cpu().clone() for gate in gates))
        for rows in _rows(begin, end, [self._inner]):
            if call is not None:
                inside = [tuple(part[:, rows] for part in parts) for parts in (mixed, gates)]
                self._effect = call.effect(inside[0], inside[1], self._effect)
            if self._keeps_inner:
                kept_gates = (gate[0, rows].cpu().clone() for gate in gates)
                self._inner_entering.append((self._copied(entering[rows]), *kept_gates))

    def finish(self) -> ChunkState:
        """Return the result, once all tokens were recorded."""
        effect = self._effect
        return ChunkState(
            torch.cat(self._entering),
            tuple(map(torch.cat, zip(*self._gates, strict=True))),
            None if effect is None else (self._copied(effect.factor), self._copied(effect.offset)),
            tuple(map(torch.cat, zip(*self._inner_entering, strict=True))),
        )

    def _copied(self, part: Tensor) -> Tensor:
        return part.to("cpu", self._dtype, copy=True).contiguous()


def _rows(begin: int, end: int, wanted: Iterable[tuple[int, int]]) -> Iterator[slice]:
    """Yield which rows of the tokens [begin, end) are in each of the ranges that are ``wanted``."""
    for low, high in wanted:
        rows = slice(max(low, begin) - begin, min(high, end) - begin)
        if rows.start < rows.stop:
            yield rows


class _Part(NamedTuple):
    """The KV of neighbouring positions from ``start`` on."""

    start: int
    kv: LayerKV

    @property
    def end(self) -> int:
        return self.start + int(self.kv.key.shape[1])


class RecordingRoom:
    """Bounds the bytes of all answers that are being collected. Methods may be called from any
    thread."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def reserve(self, nbytes: int) -> bool:
        """Reserve ``nbytes``. Return False, and reserve nothing, if less is free."""
        with self._lock:
            if self.used_bytes + nbytes > self._budget_bytes:
                return False
            self.used_bytes += nbytes
            return True

    def free(self, nbytes: int) -> None:
        """Free ``nbytes``."""
        with self._lock:
            self.used_bytes -= nbytes


class AnswerCapture:
    """Collects the KV of generated tokens, as a second copy, since the pool's keys are rotated.

    If there is no room for one more token, it drops all of them. It frees its room when it is
    deleted.
    """

    def __init__(self, layers: int, start: int, room: RecordingRoom) -> None:
        """``start`` is the position of the first token."""
        self._start = start
        self._room = room
        self._nbytes = 0
        self._refused = False
        self._parts: tuple[list[_Part], ...] = tuple([] for _ in range(layers))

    def record(self, layer: int, start: int, kv: LayerKV) -> None:
        parts = self._parts[layer]
        while parts and parts[-1].start >= start:  # computed again after a preemption
            self._free(parts.pop().kv.nbytes)
        nbytes = kv.nbytes
        if self._refused or not self._room.reserve(nbytes):
            self._refused = True
            for parts in self._parts:
                parts.clear()
            self._free(self._nbytes)
            return
        self._nbytes += nbytes
        parts.append(_Part(start, LayerKV.of_parts([part.clone() for part in kv.parts])))

    def __del__(self) -> None:
        self._free(self._nbytes)

    def _free(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        self._room.free(nbytes)

    @property
    def tokens(self) -> int:
        """The number of tokens whose KV is there in all layers."""
        return min(parts[-1].end if parts else self._start for parts in self._parts) - self._start

    def part(self, begin: int, end: int) -> ChunkKV:
        """Return the KV of the tokens [begin, end), which count from the first generated one."""
        first, last = self._start + begin, self._start + end
        return ChunkKV(tuple(_joined(parts, first, last) for parts in self._parts))


def _joined(parts: Sequence[_Part], first: int, last: int) -> LayerKV:
    """Join the KV of the positions [first, last), on the CPU."""
    found = []
    for part in parts:
        columns = slice(max(first - part.start, 0), max(last - part.start, 0))
        found.append([each[:, columns] for each in part.kv.parts])
    return LayerKV.of_parts([torch.cat(each, dim=1).cpu() for each in zip(*found, strict=True)])
