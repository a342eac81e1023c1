"""Shows the attention of a layer to its observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.picked import Picked, mask_of
from kvlinker.engines.embedded.attention.position_scores import position_weights
from kvlinker.engines.embedded.attention.views import Segments, View
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.model.rotary import Rotary


class LayerAttention(NamedTuple):
    """The attention of one layer that is about to be computed, for all queries of a batch."""

    views: Sequence[View]
    positions: NDArray[np.int64]
    query: Tensor
    segments: Segments
    rotary: Rotary | None
    options: AttentionOptions

    picked: Sequence[Picked] | None
    """The picks of indexers; None if all is seen."""


def show(index: int, batch: Batch, layer: LayerAttention, *, native: bool) -> None:
    """Pass the attention of layer ``index`` to the observers of the batch's runs."""
    for run, rows in batch.rows():
        if run.observer is None:
            continue
        mine = [view for view in layer.views if view.rows.start <= rows.start < view.rows.stop]
        mask = None if layer.picked is None else mask_of(rows, layer.picked)

        def weights(
            first: int,
            last: int,
            run_rows: slice = rows,
            mine: list[View] = mine,
            mask: Tensor | None = mask,
        ) -> Tensor:
            positions = layer.positions[run_rows][first:last]
            return position_weights(
                mine,
                positions,
                layer.query[:, run_rows][:, first:last],
                layer.segments,
                layer.rotary,
                layer.options,
                int(positions[-1]) + 1,
                picked=None if mask is None else mask[:, first:last],
                native=native,
            )

        run.observer.observe(index, run.start, len(run.tokens), weights)
