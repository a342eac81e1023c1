"""Computes one forward pass from the inside: writes the pool, attends over segments, layer by
layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvlinker.base.profiling import Profile
from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.attention.kernel import AttentionKernel, View
from kvlinker.engines.embedded.attention.picked import attend_picked
from kvlinker.engines.embedded.execution.batch import Batch, BatchSegments, SharedChunk
from kvlinker.engines.embedded.execution.index_pass import IndexPass
from kvlinker.engines.embedded.execution.late_layers import WaitInStep, late_owners
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.execution.observing import LayerAttention, Observation
from kvlinker.engines.embedded.execution.recurrent_pass import RecurrentPass
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.indexers import IndexerCall
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall
from kvlinker.store.chunk_kv import LayerKV


class EmptyStepError(Exception):
    """Raised when all requests have left the step."""


class _Peeked(Exception):  # noqa: N818
    """Raised to leave a layer once its un-rotated ``key`` and ``value`` [kv_heads, tokens,
    head_dim] are computed."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value


class ForwardPass:
    """Replaces rotary embedding and attention in one forward pass over a batch.

    Tokens leave the hidden states between the layers: tokens that a policy drops, and all tokens of
    an owner whose chunk lacks the layer that is to be attended to. The other owners' tokens are
    computed as if these had never been in the batch.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        pool: KVPool,
        batch: Batch,
        *,
        kernel: AttentionKernel,
        ahead: LayersAhead,
        profile: Profile | None,
        wait: WaitInStep,
        native: bool = True,
    ) -> None:
        """``ahead`` brings chunks' layers to the device. ``native`` is False if observers are to be
        shown weights that PyTorch alone computes."""
        self._layers = anatomy.layers
        self._kept_by = pool.kept_by
        self._attended = 0
        self._blocks = anatomy.blocks
        self._entered = 0
        self._whole = batch
        self._recurrent = RecurrentPass(anatomy, native=native)
        self._indexed = IndexPass(anatomy.layers, batch.slots)
        self._pool = pool
        self._kernel = kernel
        self._ahead = ahead
        ahead.begin_pass()
        self._profile = profile
        self._wait = wait
        self._native = native
        self._device = pool.device
        self._asked: set[int] = set()
        self._unnarrowed: Tensor | None = None
        self._peeking = False
        self.logit_rows = torch.tensor(batch.logit_rows, dtype=torch.long, device=self._device)
        """Where the wanted tokens are in the batch, in the order of ``remaining.logit_owners``.
        When tokens leave, they are updated in place; entries beyond the remaining owners are
        meaningless."""

        self.remaining = batch
        """The batch of the tokens that the hidden states still have."""

        self.remaining_rows = torch.arange(len(batch.slots), device=self._device)
        """Where these tokens were in the batch at first."""

        self.late: dict[object, int] = {}
        """The owners that left, with the first layer that their chunks lacked."""

        self._enter(batch)

    def enter_layer(self, hidden: Tensor, compute: Callable[[Tensor, Tensor], object]) -> Tensor:
        """Return the input [..., 1, tokens, ...] of the decoder layer whose turn it is, without the
        tokens that leave before it.

        Policies that have dropped nothing yet are asked here, before the layer computes anything:
        where all tokens are computed and few are kept, it is worth computing the layer's keys and
        values ahead. ``compute`` runs the layer on an input with these ``remaining_rows``. Raises
        EmptyStepError.
        """
        block, self._entered = self._entered, self._entered + 1
        if self._unnarrowed is not None:
            hidden = self._narrowed(hidden, self._unnarrowed)
            self._unnarrowed = None
        inside = [index for index, layer in enumerate(self._layers) if layer.block == block]
        for index in (self._kept_by[index] for index in inside):
            while late := late_owners(self._batch, index, self._wait):
                hidden = self._take_out(late, index, hidden)
        self._asked = {
            id(refinement)
            for refinement, _, _ in self._batch.refinements()
            if not refinement.dropped
        }
        if not self._asked or not inside or self._layers[inside[0]].source is not None:
            return hidden
        with self._timed("select"):

            def ahead(rows: slice) -> tuple[Tensor, Tensor]:
                return self._peek(rows, hidden, compute)

            kept_rows = self._refine(inside[0], ahead, at_entry=True)
        return hidden if kept_rows is None else self._narrowed(hidden, kept_rows)

    def leave_layer(self, hidden: Tensor) -> Tensor:
        """Return the output [..., 1, tokens, ...] of a decoder layer; that of the last one has all
        tokens again, zero where they left, since models rely on their number."""
        whole, axis = len(self._whole.slots), _axis_of_tokens(hidden)
        if self._entered < self._blocks or hidden.shape[axis] == whole:
            return hidden
        widened = hidden.new_zeros(*hidden.shape[:axis], whole, *hidden.shape[axis + 1 :])
        return widened.index_copy_(axis, self.remaining_rows, hidden)

    def states(self) -> dict[object, tuple[SequenceState, ...]]:
        """Return the states after the tokens so far, in layers that keep one, once all layers are
        computed."""
        return self._recurrent.states()

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do nothing: the tables that were traced at load replace the model's own."""

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Write and attend one layer; see ``Interceptor.attend``."""
        latents = self._layers[self._attended].latents
        if latents is not None:
            key, value = latents.kept(key, value)
        if self._peeking:
            raise _Peeked(key[0], value[0])
        index = self._attended
        self._attended += 1
        with self._timed("attention"):
            return self._attend(
                index, query[0], key[0], value[0], AttentionOptions.of_call(query, options)
            )[None]

    def index(self, call: IndexerCall) -> Tensor:
        """See ``Interceptor.index``."""
        return call.nothing() if self._peeking else self._indexed.begin(call)

    def convolve(self, call: ConvolutionCall) -> Tensor:
        """See ``Interceptor.convolve``."""
        return self._recurrent.convolve(call)

    def recur(self, call: RuleCall) -> tuple[Tensor, None]:
        """Advance the states of all runs by one layer; see ``Interceptor.recur``."""
        with self._timed("states"):
            return self._recurrent.recur(call)

    def _enter(self, batch: Batch) -> None:
        """Compute these runs from now on."""
        self._batch = batch
        self._recurrent.enter(batch)
        self._slots = torch.from_numpy(batch.slots).to(self._device)
        self._positions = batch.positions
        self.segments = BatchSegments(batch, self._layers, self._pool, self._kernel, self._ahead)
        self._observation = Observation(batch.observed, native=self._native)

    def _take_out(self, owners: set[object], index: int, hidden: Tensor) -> Tensor:
        """Return ``hidden`` without the owners' tokens."""
        self.late.update(dict.fromkeys(owners, index))
        keep = self._batch.without(owners)
        if not keep.any():
            raise EmptyStepError
        self._enter(self._batch.narrowed(keep))
        return self._narrowed(hidden, torch.from_numpy(np.flatnonzero(keep)).to(self._device))

    def _attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Compute attention of all runs: [tokens, heads, value_dim], zero for tokens that are
        dropped in this layer."""
        shape = self._layers[index]
        tokens = query.shape[1]
        if self._unnarrowed is not None:  # by an attention before this one in the same layer
            query = query[:, self._unnarrowed]
        if shape.source is None:
            query = self._keep(index, query, LayerKV(key, value))
        views, plan = self.segments.plan(index)
        segments = self.segments.layer(index)
        picked = None if shape.picker is None else self._indexed.of(self._batch)
        if shape.latents is not None:
            query = shape.latents.absorbed(query)
        layer = LayerAttention(
            views, self._positions, query, segments, shape.rotary, options, picked
        )
        with self._timed("select"):
            self._observation.show(index, layer)
        output = query.new_empty(query.shape[1], query.shape[0], segments[0][1].shape[2])
        if picked is None:
            self._kernel.attend(plan, query, segments, shape.rotary, options, output=output)
        else:
            attend_picked(*layer[:-1], picked, output=output, native=self._native)
        if shape.latents is not None:
            output = shape.latents.expanded(output)
        if self._unnarrowed is not None:
            whole = output.new_zeros(tokens, *output.shape[1:])
            return whole.index_copy_(0, self._unnarrowed, output)
        return output

    def _keep(self, index: int, query: Tensor, kv: LayerKV) -> Tensor:
        """Write one layer's new keys and values, and return ``query`` without the tokens that are
        dropped here."""
        earlier = self._unnarrowed
        if earlier is not None:
            kv = LayerKV(kv.key[:, earlier], kv.value[:, earlier])
        new = kv
        with self._timed("select"):
            kept = self._refine(
                index, lambda rows: (new.key[:, rows], new.value[:, rows]), at_entry=False
            )
        self._asked = set()
        if kept is not None:
            self._unnarrowed = kept if earlier is None else earlier[kept]
            query, kv = query[:, kept], LayerKV(kv.key[:, kept], kv.value[:, kept])
        into = self._kept_by[index]
        views, plan = self.segments.plan(index)
        pool = self._pool.keys[into], self._pool.values[into]
        self._kernel.write(plan, kv.key, kv.value, self._slots, self._layers[index].rotary, pool)
        if self._layers[index].indexer is not None:
            kv = replace(kv, index=self._pick(index, views))
        self._batch.capture(into, kv)
        return query

    def _pick(self, index: int, views: Sequence[View]) -> Tensor:
        """Let this layer's indexer pick for all tokens that it computes, and return what it keeps
        of them: [1, tokens, dim]."""
        pool = self._pool.indices[self._kept_by[index]]
        assert pool is not None, "a layer with an indexer keeps something for it"
        kept = self._unnarrowed
        rows = torch.arange(len(self.remaining_rows), device=self._device) if kept is None else kept
        with self._timed("pick"):
            return self._indexed.pick(
                index,
                self._batch,
                views,
                self.segments.indices(index),
                pool,
                hidden_rows=rows,
                pass_rows=self.remaining_rows[rows],
            )

    def _refine(
        self, index: int, computed: Callable[[slice], tuple[Tensor, Tensor]], *, at_entry: bool
    ) -> Tensor | None:
        """Ask the policies whose turn it is, and continue with the tokens that they keep.

        ``computed`` gives new keys, un-rotated, and values of rows of the batch. Returns the kept
        tokens' indices in the batch as it was; None when nothing was dropped.
        """
        asked = [
            item for item in self._batch.refinements() if (id(item[0]) in self._asked) == at_entry
        ]
        if not asked:
            return None
        keep = np.ones(len(self._slots), dtype=np.bool_)
        for refinement, rows, visible in asked:
            positions = self._positions[rows]
            deviations = LayerDeviations(
                positions,
                visible.shared,
                self._ahead.layer([chunk.kv for chunk in visible.shared], self._kept_by[index]),
                self._layers[index].rotary,
                cache(partial(computed, rows)),
            )
            keep[rows] = refinement.keep(index, positions, deviations)
        if keep.all():
            return None
        narrowed = self._batch.narrowed(keep)
        assert narrowed.logit_owners == self._batch.logit_owners, (
            "a token whose logits are wanted was dropped"
        )
        self._enter(narrowed)
        return torch.from_numpy(np.flatnonzero(keep)).to(self._device)

    def _narrowed(self, hidden: Tensor, kept: Tensor) -> Tensor:
        """Return ``hidden`` of the ``kept`` rows; ``_batch`` has been narrowed to them already."""
        self.remaining = self._batch
        moved = self._batch.logit_rows
        self.logit_rows.zero_()
        self.remaining_rows = self.remaining_rows[kept]
        self.logit_rows[: len(moved)] = self.remaining_rows[moved]
        return hidden.index_select(_axis_of_tokens(hidden), kept)

    def _peek(
        self, rows: slice, hidden: Tensor, compute: Callable[[Tensor, Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's keys, un-rotated, and values of these rows, without the layer's
        attention and what follows it."""
        self._peeking = True
        try:
            compute(
                hidden.narrow(_axis_of_tokens(hidden), rows.start, rows.stop - rows.start),
                self.remaining_rows[rows],
            )
        except _Peeked as peeked:
            return peeked.key, peeked.value
        finally:
            self._peeking = False
        raise RuntimeError("a layer computed no attention")

    def _timed(self, part: str) -> AbstractContextManager[None]:
        return self._profile.timed(part) if self._profile is not None else nullcontext()


def _axis_of_tokens(hidden: Tensor) -> int:
    """Return the axis after that of the batch, which has one sequence. Models with several streams
    have them before both (Gemma 3n), or after (HY V4)."""
    return hidden.shape.index(1) + 1


@dataclass(frozen=True, slots=True, eq=False)
class LayerDeviations:
    """Computes how far a layer's new keys and values of a request's active tokens are from those of
    its chunks."""

    positions: NDArray[np.int64]
    """The positions of the active tokens, ascending: [active]."""

    chunks: Sequence[SharedChunk]
    layers: Sequence[LayerKV]
    """The chunks' KV in this layer."""

    rotary: Rotary | None

    new: Callable[[], tuple[Tensor, Tensor]]
    """Returns key, un-rotated, and value [kv_heads, active, head_dim]. It is called where they are
    needed, maybe several times."""

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the deviation as ``Deviations.deviation`` specifies it; tokens of no chunk have
        none."""
        found = np.zeros(len(self.positions), dtype=np.float32)
        for chunk, layer in zip(self.chunks, self.layers, strict=True):
            first, last = np.searchsorted(
                self.positions, [chunk.start + chunk.first, chunk.start + chunk.last]
            )
            if first == last:
                continue
            positions = torch.from_numpy(self.positions[first:last])
            new = self.new()[part][:, first:last]
            if part == 0 and self.rotary is not None:
                rotated = torch.empty_like(new, memory_format=torch.contiguous_format)
                distances = (positions - chunk.start).to(new.device)
                self.rotary.rotate(new, *self.rotary.at(distances), out=rotated)
                new = rotated
            stored = (layer.key, layer.value)[part][:, positions - chunk.start].to(new.device)
            squares = (new.float() - stored.float()).square_().sum(dim=(0, 2))
            found[first:last] = squares.cpu().numpy()
        return found
