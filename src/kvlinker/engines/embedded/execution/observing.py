"""Shows the attention of a batch's layers to the observers of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.picked import Picked, mask_of
from kvlinker.engines.embedded.attention.position_scores import PositionScores
from kvlinker.engines.embedded.attention.views import Segments, View
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.model.rotary import Rotary

FEW_QUERIES = 8
"""The most queries for which what is the same in many layers is kept."""


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


class Observation:
    """Passes the attention of one batch's layers to its observers."""

    def __init__(self, batch: Batch, *, native: bool) -> None:
        """With ``native``, native code computes what it can."""
        self._observed = [(run, rows) for run, rows in batch.rows() if run.observer is not None]
        self._native = native
        self._prepared: dict[tuple[object, ...], PositionScores] = {}

    def show(self, index: int, layer: LayerAttention) -> None:
        """Pass the attention of layer ``index`` to the observers. Its views are the same object in
        all layers that show the same."""
        for run, rows in self._observed:
            assert run.observer is not None

            def weights(first: int, last: int, rows: slice = rows) -> Tensor:
                return self._weights(layer, rows, slice(rows.start + first, rows.start + last))

            run.observer.observe(index, run.start, len(run.tokens), weights)

    def _weights(self, layer: LayerAttention, rows: slice, asked: slice) -> Tensor:
        """Return the weights of some queries of the run with these rows."""
        positions, window = layer.positions[asked], layer.options.window
        alike = id(layer.views), asked.start, asked.stop, window, layer.rotary
        scores = self._prepared.get(alike)
        if scores is None:
            scores = PositionScores(
                [view for view in layer.views if view.rows.start <= rows.start < view.rows.stop],
                positions,
                layer.rotary,
                window,
                int(positions[-1]) + 1,
                device=layer.query.device,
                native=self._native,
            )
            if len(positions) <= FEW_QUERIES:
                self._prepared[alike] = scores
        picked = None
        if layer.picked is not None:
            first = asked.start - rows.start
            picked = mask_of(rows, layer.picked)[:, first : first + len(positions)]
        return scores.weights(layer.query[:, asked], layer.segments, layer.options, picked=picked)
