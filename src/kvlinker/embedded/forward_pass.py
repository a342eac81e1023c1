"""One forward pass: places chunks, writes new KV to the pool and attends by position, layer by layer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvlinker.embedded.attention.kernels import AttentionKernel
from kvlinker.embedded.batch import Batch, Placed
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.model.interception import RotaryFunction
from kvlinker.embedded.pool import KVPool
from kvlinker.engine.attention import AttentionOptions
from kvlinker.store.loading.arriving import ArrivingKV

WaitInStep = Callable[[Callable[[], bool]], None]
"""Waits until its argument returns true, or until a request outside the step could be computed."""


def never_wait(came: Callable[[], bool]) -> None:
    """Return at once, as if another request could be computed."""


class NobodyLeftError(Exception):
    """Raised when all requests have left the step."""


class _Peeked(Exception):  # noqa: N818
    """Raised to leave a layer once its un-rotated ``key`` and ``value`` [kv_heads, tokens, head_dim] are computed."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value


class ForwardPass:
    """Replaces rotary embedding and attention in one forward pass over a batch.

    Tokens leave the hidden states between the layers: tokens that a policy drops, and all tokens of an owner whose
    chunk lacks the layer that is to be placed. The other owners' tokens are computed as if these had never been in the
    batch.
    """

    def __init__(
        self,
        layers: tuple[LayerShape, ...],
        pool: KVPool,
        batch: Batch,
        *,
        kernel: AttentionKernel,
        profile: Profile | None,
        wait: WaitInStep,
    ) -> None:
        self._layers = layers
        self._pool = pool
        self._kernel = kernel
        self._profile = profile
        self._wait = wait
        self._device = pool.keys[0].device
        self._placed = batch.placed
        self._length = max(
            [run.end for run in batch.runs] + [placed.rotary_start + placed.tokens for placed in batch.placed]
        )
        self._placed_layers = 0
        self._asked: set[int] = set()
        self._unnarrowed: Tensor | None = None
        self._peeking = False
        self.logit_rows = torch.tensor(batch.logit_rows, dtype=torch.long, device=self._device)
        """The rows of the last layer's output whose logits are wanted, in the order of ``remaining.logit_owners``;
        updated when owners leave. Entries beyond those owners are meaningless."""

        self.remaining = batch
        """The batch of the tokens that the hidden states still have."""

        self.left: dict[object, int] = {}
        """The owners that left, with the first layer that their chunks lacked."""

        self._enter(batch)

    def enter_layer(self, index: int, hidden: Tensor, compute: Callable[[Tensor], object]) -> Tensor:
        """Return the layer's input [1, tokens, width] without the tokens that leave before it.

        Policies that have dropped nothing yet are asked here, before the layer computes anything: when most tokens are
        about to be dropped, it pays to compute the layer's keys and values ahead. ``compute`` runs the layer on an
        input. Raises NobodyLeftError.
        """
        if self._unnarrowed is not None:
            hidden = self._narrowed(hidden, self._unnarrowed)
            self._unnarrowed = None
        hidden = self._without_late(index, hidden)
        self._asked = {id(refinement) for refinement, _ in self._batch.refinements() if not refinement.dropped}
        if not self._asked:
            return hidden
        with self._timed("place"):
            self._place_layer(index)
        with self._timed("select"):

            def ahead(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
                return self._peek(index, rows, hidden, compute)

            kept = self._refine(index, ahead, at_entry=True)
        return hidden if kept is None else self._narrowed(hidden, kept)

    def rotary(self, apply: RotaryFunction, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Do nothing: the tables that were traced at load stand in for the model's own."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Place, write and attend one layer; see ``Interceptor.attend``."""
        if self._peeking:
            raise _Peeked(key[0], value[0])
        index = int(module.layer_idx)  # type: ignore[arg-type]
        with self._timed("place"):
            self._place_layer(index)
        with self._timed("attention"):
            return self._attend(index, query[0], key[0], value[0], AttentionOptions.of_call(query, options))[None]

    def _enter(self, batch: Batch) -> None:
        """Prepare to compute the runs of ``batch`` from now on."""
        self._batch = batch
        self._groups = self._kernel.group(batch, self._device)
        self._slots = torch.from_numpy(batch.slots).to(self._device)
        self._positions = torch.from_numpy(batch.positions).to(self._device)
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}

    def _without_late(self, index: int, hidden: Tensor) -> Tensor:
        """Return ``hidden`` without the tokens of owners whose chunks lack this layer. If all owners lack it, and no
        other request could be computed meanwhile, wait for the layer first."""
        while lacking := self._lacking(index):
            late = {placed.owner for placed in lacking}
            lost = {placed.owner for placed in lacking if placed.kv.lost}
            if late != self._batch.owners:
                hidden = self._leave(late, index, hidden)
            elif lost:
                hidden = self._leave(lost, index, hidden)
            else:
                self._wait(partial(self._changed, index, lacking))
                if not self._changed(index, lacking):
                    hidden = self._leave(late, index, hidden)
        return hidden

    def _lacking(self, index: int) -> list[_Arriving]:
        """Return the placements whose layer has not arrived."""
        return [
            _Arriving(placed.owner, placed.kv)
            for placed in self._placed
            if isinstance(placed.kv, ArrivingKV) and placed.kv.layer(index) is None
        ]

    def _changed(self, index: int, lacking: list[_Arriving]) -> bool:
        return any(placed.kv.layer(index) is not None or placed.kv.lost for placed in lacking)

    def _leave(self, owners: set[object], index: int, hidden: Tensor) -> Tensor:
        """Take the owners' tokens out of ``hidden``."""
        self.left.update(dict.fromkeys(owners, index))
        self._placed = tuple(placed for placed in self._placed if placed.owner not in owners)
        keep = self._batch.without(owners)
        if not keep.any():
            raise NobodyLeftError
        self._enter(self._batch.narrowed(keep))
        return self._narrowed(hidden, torch.from_numpy(np.flatnonzero(keep)).to(self._device))

    def _attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Return the attention of all runs: [tokens, heads, value_dim], zero for tokens that are dropped in this
        layer."""
        tokens = query.shape[1]
        for run, rows in self._batch.rows():
            if run.capture is not None:
                run.capture.record(index, run.start, key[:, rows], value[:, rows])
        rotated_query, rotated_key = self._rotated(index, query), self._rotated(index, key)
        pool_key, pool_value = self._pool.keys[index], self._pool.values[index]
        with self._timed("select"):

            def computed(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
                active = torch.from_numpy(rows).to(self._device)
                return rotated_key[:, active], value[:, active]

            kept = self._refine(index, computed, at_entry=False)
        if kept is not None:
            self._unnarrowed = kept
            rotated_query, rotated_key, value = rotated_query[:, kept], rotated_key[:, kept], value[:, kept]
        pool_key.index_copy_(1, self._slots, rotated_key)
        pool_value.index_copy_(1, self._slots, value)
        with self._timed("select"):
            self._show(index, rotated_query, pool_key, options)
        output = query.new_empty(rotated_query.shape[1], query.shape[0], value.shape[2])
        for group in self._groups:
            seen = slice(group.slot, group.slot + group.queries.last + 1)
            self._kernel.attend(
                group.queries,
                rotated_query[:, group.rows],
                pool_key[:, seen],
                pool_value[:, seen],
                options,
                output=output[group.rows].transpose(0, 1),
            )
        if kept is not None:
            return output.new_zeros(tokens, *output.shape[1:]).index_copy_(0, kept, output)
        return output

    def _show(self, index: int, query: Tensor, pool_key: Tensor, options: AttentionOptions) -> None:
        """Let observers see the attention that is about to be computed."""
        for run, rows in self._batch.rows():
            if run.observer is not None:
                keys = pool_key[:, run.slot : run.slot + run.end]
                run.observer.observe(index, run.start, query[:, rows], keys, options)

    def _refine(
        self, index: int, computed: Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]], *, at_entry: bool
    ) -> Tensor | None:
        """Ask the policies whose turn it is, and narrow the batch to the tokens that they keep.

        ``computed`` returns new keys and values of rows of the batch. Returns the kept tokens' indices in the batch as
        it was; None when nothing was dropped.
        """
        keep = np.ones(len(self._slots), dtype=np.bool_)
        for refinement, rows in self._batch.refinements():
            if (id(refinement) in self._asked) == at_entry:
                deviations = LayerDeviations(
                    new=partial(computed, rows),
                    pool=(self._pool.keys[index], self._pool.values[index]),
                    slots=self._slots[torch.from_numpy(rows).to(self._device)],
                )
                keep[rows] = refinement.keep(index, self._batch.positions[rows], deviations)
        if keep.all():
            return None
        narrowed = self._batch.narrowed(keep)
        assert narrowed.logit_owners == self._batch.logit_owners, "a token whose logits are wanted was dropped"
        self._enter(narrowed)
        return torch.from_numpy(np.flatnonzero(keep)).to(self._device)

    def _narrowed(self, hidden: Tensor, kept: Tensor) -> Tensor:
        """Return the rows ``kept`` of ``hidden``; the batch has been narrowed to them already."""
        self.remaining = self._batch
        moved = self._batch.logit_rows
        self.logit_rows.zero_()
        self.logit_rows[: len(moved)] = torch.tensor(moved, dtype=torch.long)
        return hidden[:, kept]

    def _peek(
        self, index: int, rows: NDArray[np.int64], hidden: Tensor, compute: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's rotated keys and values of these rows, without computing its attention or what follows."""
        active = torch.from_numpy(rows).to(self._device)
        self._peeking = True
        try:
            compute(hidden[:, active])
        except _Peeked as peeked:
            return self._rotated(index, peeked.key, active), peeked.value
        finally:
            self._peeking = False
        raise RuntimeError(f"layer {index} computed no attention")

    def _rotated(self, index: int, heads: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return ``heads`` [heads, tokens, head_dim] rotated for the positions of the batch's tokens, or of its
        ``rows``."""
        rotary = self._layers[index].rotary
        if rotary is None:
            return heads
        if id(rotary) not in self._angles:
            cos, sin = rotary.tables(self._length)
            self._angles[id(rotary)] = cos[self._positions], sin[self._positions]
        rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
        cos, sin = self._angles[id(rotary)]
        rotary.rotate(heads, *((cos, sin) if rows is None else (cos[rows], sin[rows])), out=rotated)
        return rotated

    def _place_layer(self, index: int) -> None:
        """Place this layer of all chunks, unless that is done."""
        if self._placed_layers <= index:
            self._placed_layers = index + 1
            for placed in self._placed:
                self._place(index, placed)

    def _place(self, index: int, placed: Placed) -> None:
        slots = slice(placed.slot, placed.slot + placed.tokens)
        layer = placed.kv.layer(index)
        assert layer is not None, "its owner has left"
        rotary = self._layers[index].rotary
        key = layer.key[:, placed.first : placed.last].to(self._device, non_blocking=True)
        if rotary is None:
            self._pool.keys[index][:, slots] = key
        else:
            positions = slice(placed.rotary_start, placed.rotary_start + placed.tokens)
            cos, sin = rotary.tables(self._length)
            rotary.rotate(key, cos[positions], sin[positions], out=self._pool.keys[index][:, slots])
        self._pool.values[index][:, slots] = layer.value[:, placed.first : placed.last]

    def _timed(self, part: str) -> AbstractContextManager[None]:
        return self._profile.timed(part) if self._profile is not None else nullcontext()


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A placement for ``owner`` whose KV has not arrived completely."""

    owner: object
    kv: ArrivingKV


@dataclass(frozen=True)
class LayerDeviations:
    """The deviation of a layer's newly computed keys and values from those in the pool, for a request's active
    tokens."""

    new: Callable[[], tuple[Tensor, Tensor]]
    """Computes the rotated key and value [kv_heads, active, head_dim] when they are first asked for."""

    pool: tuple[Tensor, Tensor]
    """All keys and values [kv_heads, slots, head_dim]."""

    slots: Tensor
    """The slots of the active tokens in the pool: [active]."""

    @cached_property
    def _new(self) -> tuple[Tensor, Tensor]:
        return self.new()

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the squared deviation per active token: see ``Deviations.deviation``."""
        difference = self._new[part].float() - self.pool[part][:, self.slots].float()
        deviation: NDArray[np.float32] = difference.square_().sum(dim=(0, 2)).cpu().numpy()
        return deviation


class Profile:
    """Adds up the wall time of named parts in ``seconds``; time in a nested part counts for the nested part only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the wall time of the block to ``part``."""
        before, self._inner = self._inner, 0.0
        begin = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            self.seconds[part] += elapsed - self._inner
            self._inner = before + elapsed
