"""Describes the work of one step: runs of many requests, and the KV that their queries see."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.observation import Observer
from kvlinker.engines.embedded.decoding.logprobs import LogprobCollector
from kvlinker.engines.embedded.execution.capturing import Recorder
from kvlinker.engines.embedded.kv_cache.pool import SlotSpan
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.linking.plan import DroppedTokens
from kvlinker.linking.refinement import Refinement
from kvlinker.store.loading.arriving import KV, ArrivingKV


@dataclass(frozen=True, slots=True, eq=False)
class SharedChunk:
    """A chunk's resident KV as one sequence sees it: any number of sequences may see it at the same
    time, each at another position."""

    kv: KV

    start: int
    """The position of the chunk's token 0 in the sequence."""

    rotary_start: int
    """The position from which the keys' rotary embedding counts; it is ``start``, but for
    ablations."""

    first: int
    last: int
    """Tokens [first, last) of the chunk are seen."""


class OwnTokens:
    """The layers in which a prompt's computed tokens are the sequence's own: from the first layer
    on, until a policy drops them. A token that is its own in a layer hides its copy in a shared
    chunk there.

    Layers are distinguished by their *epoch*, the number of times that tokens were dropped up to
    them.
    """

    def __init__(
        self,
        positions: NDArray[np.int64],
        shared: Sequence[SharedChunk],
        dropped: Sequence[DroppedTokens] = (),
    ) -> None:
        """``positions`` [computed], ascending, are those of the prompt's computed tokens.
        ``dropped`` may grow."""
        self.positions = positions
        self._shared = tuple(shared)
        self._dropped = dropped
        self._hidden: dict[int, tuple[NDArray[np.bool_] | None, ...]] = {}

    @property
    def all_stay(self) -> bool:
        """True while no token has been dropped: all layers are of one epoch."""
        return not self._dropped

    def epoch(self, layer: int) -> int:
        """Return the layer's epoch."""
        return bisect_right([first for first, _ in self._dropped], layer) if self._dropped else 0

    def gone(self, epoch: int, count: int) -> NDArray[np.bool_] | None:
        """Mask the first ``count`` of the sequence's own tokens that are dropped: [count]; None if
        none is."""
        if not epoch:
            return None
        mask = np.zeros(count, dtype=np.bool_)
        for _, positions in self._dropped[:epoch]:
            mask[np.searchsorted(self.positions, positions)] = True
        return mask

    def hidden(self, epoch: int) -> tuple[NDArray[np.bool_] | None, ...]:
        """Mask, for every shared chunk, the tokens that are the sequence's own: [tokens]; None if
        none is."""
        if epoch not in self._hidden:
            gone = self.gone(epoch, len(self.positions))
            own = self.positions if gone is None else self.positions[~gone]
            self._hidden[epoch] = tuple(
                _inside(own, chunk.start, chunk.kv.tokens) for chunk in self._shared
            )
        return self._hidden[epoch]


def _inside(positions: NDArray[np.int64], start: int, length: int) -> NDArray[np.bool_] | None:
    """Mask the ``positions`` in [start, start + length): [length]; None if there are none."""
    first, last = np.searchsorted(positions, [start, start + length])
    if first == last:
        return None
    mask = np.zeros(length, dtype=np.bool_)
    mask[positions[first:last] - start] = True
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKV:
    """The KV that a sequence's queries see in one step: shared chunks, and its own tokens in the
    pool."""

    shared: tuple[SharedChunk, ...]

    spans: tuple[SlotSpan, ...]
    """Where its own tokens lie in the pool, in order; several sequences may see the same span."""

    positions: NDArray[np.int64]
    """The positions of its own tokens, ascending, up to the last that this step computes."""

    own: OwnTokens

    state: SequenceState | None = None
    """The state after the tokens before, in layers that keep one; None before the first token."""

    marks: tuple[int, ...] = ()
    """Positions, ascending: the state after the tokens before each is wanted, too."""


@dataclass(frozen=True, slots=True)
class Run:
    """Positions [start, start + len(tokens)) of one request, to be computed now."""

    slots: NDArray[np.int64]
    """The slots of the pool where its tokens lie: [tokens]."""

    start: int
    tokens: NDArray[np.int64]

    wants_logits: bool = False
    """True if the last token's logits are needed."""

    capture: Recorder | None = None
    """Collects the KV of its tokens."""

    refinement: Refinement | None = None
    """Decides which tokens are dropped between layers. It is the same for all runs of a request,
    and never comes with ``capture``."""

    observer: Observer | None = None
    """Observes the attention of this run's queries."""

    logprobs: LogprobCollector | None = None
    """Collects from the last hidden states of fresh tokens."""

    owner: object = None
    """The sequence that the run belongs to; a step's results are keyed by it."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. The runs of a sequence are neighbours, disjoint and ascending;
    ``visible_kv`` has the KV that each owner of a run sees."""

    runs: tuple[Run, ...]
    visible_kv: Mapping[object, VisibleKV]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token ids of all runs: [tokens]."""
        return np.concatenate([run.tokens for run in self.runs])

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of every token in its own request: [tokens]."""
        return np.concatenate([np.arange(run.start, run.end) for run in self.runs])

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slot of the pool that holds each token's KV: [tokens]."""
        return np.concatenate([run.slots for run in self.runs])

    @property
    def logit_rows(self) -> list[int]:
        """The tokens whose logits are wanted, by their index in the batch."""
        return [rows.stop - 1 for run, rows in self.rows() if run.wants_logits]

    @property
    def logit_owners(self) -> list[object]:
        """The owners of ``logit_rows``, in the same order."""
        return [run.owner for run in self.runs if run.wants_logits]

    @property
    def is_plain(self) -> bool:
        """True if its tokens are only computed, and perhaps observed: none is recorded or dropped,
        and all chunks are there."""
        return all(
            run.capture is None and run.refinement is None and run.logprobs is None
            for run in self.runs
        ) and all(
            chunk.kv.complete for _, chunk in self.shared() if isinstance(chunk.kv, ArrivingKV)
        )

    @property
    def is_observed(self) -> bool:
        """True if an observer is to be shown attention."""
        return any(run.observer is not None for run in self.runs)

    @property
    def owners(self) -> set[object]:
        """The sequences that have runs here."""
        return {run.owner for run in self.runs}

    def shared(self) -> Iterator[tuple[object, SharedChunk]]:
        """Yield all shared chunks with the owners that see them, in the order of the runs."""
        for owner in dict.fromkeys(run.owner for run in self.runs):
            for chunk in self.visible_kv[owner].shared:
                yield owner, chunk

    def rows(self) -> Iterator[tuple[Run, slice]]:
        """Yield every run with the tokens of the batch that it takes."""
        begin = 0
        for run in self.runs:
            yield run, slice(begin, begin + len(run.tokens))
            begin += len(run.tokens)

    def owner_rows(self) -> Iterator[tuple[object, slice]]:
        """Yield every owner with the tokens of the batch that its runs take."""
        for owner, runs in groupby(self.rows(), key=lambda found: found[0].owner):
            parts = [rows for _, rows in runs]
            yield owner, slice(parts[0].start, parts[-1].stop)

    def refinements(self) -> Iterator[tuple[Refinement, slice, VisibleKV]]:
        """Yield every refinement with its request's tokens in the batch, and the KV that they
        see."""
        for owner, rows in self.owner_rows():
            refinement = next(run.refinement for run in self.runs if run.owner is owner)
            if refinement is not None:
                yield refinement, rows, self.visible_kv[owner]

    def without(self, owners: set[object]) -> NDArray[np.bool_]:
        """Mask of the tokens that belong to none of these owners: [tokens]."""
        return np.repeat(
            [run.owner not in owners for run in self.runs], [len(run.tokens) for run in self.runs]
        )

    def narrowed(self, keep: NDArray[np.bool_]) -> Batch:
        """Return the batch without the tokens where ``keep`` [tokens] is false."""
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
                        slots=run.slots[part],
                        start=run.start + part.start,
                        tokens=run.tokens[part],
                        wants_logits=run.wants_logits and end == rows.stop,
                    )
                )
        return Batch(tuple(runs), self.visible_kv)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, by owner. An owner that appears in neither field asked for no
    logits."""

    logits: dict[object, Tensor]
    """The last token's logits [vocabulary], fp32, on the CPU, for every owner that wanted them and
    did not leave."""

    left: dict[object, int]
    """The owners that left the step because a chunk's layer had not arrived, each with the first
    layer that was missing."""

    states: dict[object, tuple[SequenceState, ...]]
    """The state after the tokens so far, in layers that keep one, for every owner that did not
    leave; empty for a model without such layers."""

    is_usual: bool = True
    """False if more was done than to compute it, so that its time says nothing about others'."""
