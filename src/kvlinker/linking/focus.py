"""Focused chunks: those that the question keeps looking at, layer after layer (Cache-Craft, Algorithm 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import LayerEvidence


def in_focus(evidence: LayerEvidence, window: int) -> NDArray[np.bool_] | None:
    """The active tokens of focused chunks, [active], in the layer in which the focus settles; None in all others."""
    settled = settled_focus(evidence.chunk_attention(), window)
    if settled is None or settled[1] != evidence.layer:
        return None
    chunk_of = np.full(len(evidence.prompt), -1)
    for index, span in enumerate(evidence.prompt.spans):
        chunk_of[span.start : span.end] = index
    return np.isin(chunk_of[evidence.positions], list(settled[0]))


def focused_chunks(attention: NDArray[np.floating]) -> frozenset[int]:
    """The chunks that the question's ``attention`` [chunks] singles out (Algorithm 1, lines 4 to 9).

    Sorted in descending order, the differences of neighbours are normalised to p; the set ends where the running
    entropy of p grows most. With fewer than three chunks, and where all get the same, all are focused.
    """
    order = np.argsort(-attention, kind="stable")
    gaps = -np.diff(attention[order].astype(np.float64))
    if len(attention) < 3 or not gaps.sum() > 0:
        return frozenset(range(len(attention)))
    share = gaps / gaps.sum()
    growth = -share * np.log(np.where(share > 0, share, 1.0))  # h[i] - h[i-1]
    return frozenset(order[: int(np.argmax(growth[1:])) + 1].tolist())


def settled_focus(attention: NDArray[np.floating], window: int) -> tuple[frozenset[int], int] | None:
    """The focused chunks and the layer after which they were the same for ``window`` layers (Algorithm 1).

    ``attention`` [layers, chunks]: the question's attention in each layer; sums run over the layers. None while they
    have not settled.
    """
    history = [focused_chunks(total) for total in np.cumsum(attention, axis=0)]
    for layer in range(window, len(history) + 1):
        if len(set(history[layer - window : layer])) == 1:
            return history[layer - 1], layer
    return None
