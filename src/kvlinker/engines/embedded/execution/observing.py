"""Shows the attention of a batch's layers to the observers of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.observation import mean_over_heads
from kvlinker.engines.embedded.attention.kernel import Segments, View
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.attention.native_kernel import SHARED_HEADS, NativePlan
from kvlinker.engines.embedded.attention.picked import Picked, mask_of
from kvlinker.engines.embedded.attention.position_scores import PositionScores
from kvlinker.engines.embedded.execution.batch import Run
from kvlinker.engines.embedded.model.rotary import Rotary

FEW_QUERIES = 8
"""The most queries whose weights are computed by head, as fast as otherwise, and what is the same
in many layers is kept."""


class LayerAttention(NamedTuple):
    """The attention of one layer, whose keys are computed, for all queries of a batch."""

    views: Sequence[View]
    positions: NDArray[np.int64]
    query: Tensor
    segments: Segments
    rotary: Rotary | None
    options: AttentionOptions

    picked: Sequence[Picked] | None
    """The picks of indexers; None if all is seen."""


@dataclass(eq=False, slots=True)
class Observation:
    """Passes the attention of one batch's layers to its observers."""

    observed: Sequence[tuple[Run, slice]]
    """The runs whose attention is observed, with the tokens of the batch that they have."""

    native: bool
    """True if native code computes the weights, where it can."""

    _scores: dict[tuple[object, ...], PositionScores] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], NativePlan] = field(default_factory=dict)

    def show(self, index: int, layer: LayerAttention) -> None:
        """Pass the attention of layer ``index`` to the observers. Its views are the same object in
        all layers that show the same."""
        for run, rows in self.observed:
            assert run.observer is not None

            def weights(first: int, last: int, rows: slice = rows) -> Tensor:
                return self._weights(layer, rows, first, last)

            run.observer.observe(index, run.start, len(run.tokens), weights)

    def _weights(self, layer: LayerAttention, rows: slice, first: int, last: int) -> Tensor:
        """Return the weights of the queries [first, last) of the run with these rows, mean over
        heads."""
        if self.native and last - first > FEW_QUERIES and _fits(layer):
            kernel = native_attention()
            if kernel is not None:
                asked = slice(rows.start + first, rows.start + last)
                plan = self._plan(layer, rows, asked)
                return kernel.mean_weights(
                    plan, layer.query[:, asked], layer.segments, layer.rotary, layer.options
                )

        def by_head(first: int, last: int) -> Tensor:
            return self._by_head(layer, rows, slice(rows.start + first, rows.start + last))

        return mean_over_heads(by_head, first, last)

    def _plan(self, layer: LayerAttention, rows: slice, asked: slice) -> NativePlan:
        alike = id(layer.views), asked.start, asked.stop
        if alike not in self._plans:
            own = slice(0, asked.stop - asked.start)
            views = [replace(view, rows=own) for view in _views_of(layer, rows)]
            self._plans[alike] = NativePlan.of(views, layer.positions[asked])
        return self._plans[alike]

    def _by_head(self, layer: LayerAttention, rows: slice, asked: slice) -> Tensor:
        """Return the weights of some queries of the run with these rows, by head."""
        positions, window = layer.positions[asked], layer.options.window
        alike = id(layer.views), asked.start, asked.stop, window, layer.rotary
        scores = self._scores.get(alike)
        if scores is None:
            scores = PositionScores(
                _views_of(layer, rows),
                positions,
                layer.rotary,
                window,
                int(positions[-1]) + 1,
                device=layer.query.device,
                native=self.native,
            )
            if len(positions) <= FEW_QUERIES:
                self._scores[alike] = scores
        picked = None
        if layer.picked is not None:
            first = asked.start - rows.start
            picked = mask_of(rows, layer.picked)[:, first : first + len(positions)]
        return scores.weights(layer.query[:, asked], layer.segments, layer.options, picked=picked)


def _views_of(layer: LayerAttention, rows: slice) -> list[View]:
    """Return what the sequence sees whose run has these rows."""
    return [view for view in layer.views if view.rows.start <= rows.start < view.rows.stop]


def _fits(layer: LayerAttention) -> bool:
    """Return whether native code computes a layer's weights."""
    heads, _, dim = layer.query.shape
    return (
        layer.picked is None
        and layer.query.is_cpu
        and dim % 2 == 0
        and (layer.rotary is None or layer.rotary.pairing is not None)
        and heads <= SHARED_HEADS * len(layer.segments[0][0])
        and all(
            tensor.dtype == torch.bfloat16
            for tensor in (layer.query, *chain.from_iterable(layer.segments))
        )
    )
