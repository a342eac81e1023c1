"""The work of one engine step: runs of many requests, and the chunks that are placed before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.scoring import LogprobCollector
from kvlinker.engine.observation import Observer, ScoreCollector
from kvlinker.linking.refinement import Refinement
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.loading.arriving import KV


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement of one step: tokens [first, last) of a chunk's KV are written to the slots from ``slot`` on, with the
    rotary embedding of the positions from ``rotary_start`` on. Slot and position are those of token ``first``;
    ``owner`` is the sequence that they belong to."""

    kv: KV
    first: int
    last: int
    slot: int
    rotary_start: int
    owner: object = None

    @property
    def tokens(self) -> int:
        return self.last - self.first


class Capture:
    """Collects the KV of chunks while a sequence that holds them is computed: keys without rotary embedding."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        spans: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype,
        scores: ScoreCollector | None = None,
    ) -> None:
        """``spans`` are the positions [start, end) of the chunks. ``scores`` collects the chunks' scores, in the same
        order."""
        self._shapes = layers
        self._spans = tuple(spans)
        self._dtype = dtype
        self.scores = scores

    @cached_property
    def _chunks(self) -> tuple[tuple[LayerKV, ...], ...]:
        """The KV per chunk and layer. It is allocated when the sequence's turn comes, not while it waits."""
        return tuple(
            tuple(
                LayerKV(
                    key=torch.empty(shape.kv_heads, end - start, shape.key_dim, dtype=self._dtype),
                    value=torch.empty(shape.kv_heads, end - start, shape.value_dim, dtype=self._dtype),
                )
                for shape in self._shapes
            )
            for start, end in self._spans
        )

    def record(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Take one run's un-rotated ``key`` and ``value`` [kv_heads, run, head_dim] from position ``start`` on."""
        for (first, last), chunk in zip(self._spans, self._chunks, strict=True):
            begin, end = max(start, first), min(start + key.shape[1], last)
            if begin < end:
                rows, columns = slice(begin - start, end - start), slice(begin - first, end - first)
                chunk[layer].key[:, columns] = key[:, rows]
                chunk[layer].value[:, columns] = value[:, rows]

    def finish(self) -> tuple[ChunkKV, ...]:
        """Return the KV of every chunk, once all layers have seen all tokens."""
        scores = [None] * len(self._spans) if self.scores is None else self.scores.finish()
        return tuple(ChunkKV(layers, found) for layers, found in zip(self._chunks, scores, strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, start + len(tokens)) of one request, to be computed now."""

    slot: int
    """The slot of the pool that holds the request's position 0."""

    start: int
    tokens: NDArray[np.int64]

    wants_logits: bool = False
    """True if the logits of the run's last token are needed."""

    capture: Capture | None = None
    """Collects the KV of chunks."""

    refinement: Refinement | None = None
    """May drop tokens between layers. It is the same for all runs of a request, and never comes with ``capture``."""

    observer: Observer | None = None
    """Sees the attention of this run's queries."""

    logprobs: LogprobCollector | None = None
    """Takes the last hidden states of fresh tokens."""

    owner: object = None
    """The sequence that the run belongs to; the step's results are keyed by it."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Within a request, runs are disjoint and ascending; placements come before all runs."""

    runs: tuple[Run, ...]
    placed: tuple[Placed, ...] = field(default=())

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token ids of all runs: [tokens]."""
        return np.concatenate([run.tokens for run in self.runs])

    @property
    def positions(self) -> NDArray[np.int64]:
        """Every token's position in its own request: [tokens]."""
        return np.concatenate([np.arange(run.start, run.end) for run in self.runs])

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slot of every token in the pool: [tokens]."""
        return np.concatenate([np.arange(run.slot + run.start, run.slot + run.end) for run in self.runs])

    @property
    def logit_rows(self) -> list[int]:
        """The tokens whose logits are wanted, by their index in the batch."""
        return [rows.stop - 1 for run, rows in self.rows() if run.wants_logits]

    @property
    def logit_owners(self) -> list[object]:
        """The owners of ``logit_rows``, in the same order."""
        return [run.owner for run in self.runs if run.wants_logits]

    @property
    def owners(self) -> set[object]:
        """The sequences that have runs here."""
        return {run.owner for run in self.runs}

    def rows(self) -> Iterator[tuple[Run, slice]]:
        """Yield every run with its slice of the batch's tokens."""
        begin = 0
        for run in self.runs:
            yield run, slice(begin, begin + len(run.tokens))
            begin += len(run.tokens)

    def refinements(self) -> Iterator[tuple[Refinement, NDArray[np.int64]]]:
        """Yield every refinement with the indices of its request's tokens in the batch."""
        found: dict[int, tuple[Refinement, list[NDArray[np.int64]]]] = {}
        for run, rows in self.rows():
            if run.refinement is not None:
                _, parts = found.setdefault(id(run.refinement), (run.refinement, []))
                parts.append(np.arange(rows.start, rows.stop))
        for refinement, parts in found.values():
            yield refinement, np.concatenate(parts)

    def without(self, owners: set[object]) -> NDArray[np.bool_]:
        """Mask of the tokens that belong to none of these owners: [tokens]."""
        return np.repeat([run.owner not in owners for run in self.runs], [len(run.tokens) for run in self.runs])

    def narrowed(self, keep: NDArray[np.bool_]) -> Batch:
        """Return the batch without the tokens where ``keep`` [tokens] is false; nothing is left to place."""
        found = list(self.rows())
        run_of = np.repeat(np.arange(1, len(found) + 1), [len(run.tokens) for run in self.runs])
        labels = np.where(keep, run_of, 0)  # a kept token's run, 0 for dropped ones
        edges = np.flatnonzero(np.diff(labels, prepend=0, append=0)).tolist()
        runs = []
        for begin, end in pairwise(edges):
            if labels[begin]:
                run, rows = found[labels[begin] - 1]
                part = slice(begin - rows.start, end - rows.start)
                runs.append(
                    replace(
                        run,
                        start=run.start + part.start,
                        tokens=run.tokens[part],
                        wants_logits=run.wants_logits and end == rows.stop,
                    )
                )
        return Batch(tuple(runs))


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, by owner. An owner that appears in neither field asked for no logits."""

    logits: dict[object, Tensor]
    """The last token's logits [vocabulary], fp32, on the CPU, for every owner that wanted them and did not leave."""

    left: dict[object, int]
    """The owners that left the step because a chunk's layer had not arrived, each with the first layer that was
    missing."""
