"""All figures by name, in the order of the page."""

from __future__ import annotations

from kvlinker.errors import InvalidRequestError
from kvlinker.figures import (
    cacheblend_attention,
    cacheblend_deviation,
    cacheblend_layers,
    cacheblend_ratio,
    cacheblend_retrieval,
    cachecraft_ablation,
    cachecraft_orders,
    cachecraft_overhead,
    cachecraft_positions,
    cachecraft_quality,
    cachecraft_scores,
    cachecraft_tokens,
    contexts,
    epic_length,
    epic_splitting,
    epic_tradeoff,
    frontier,
)
from kvlinker.figures.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        epic_tradeoff.FIGURE,
        epic_length.FIGURE,
        epic_splitting.FIGURE,
        cacheblend_retrieval.FIGURE,
        cacheblend_attention.FIGURE,
        cacheblend_deviation.FIGURE,
        cacheblend_layers.FIGURE,
        cacheblend_ratio.FIGURE,
        cachecraft_positions.FIGURE,
        cachecraft_scores.FIGURE,
        cachecraft_overhead.FIGURE,
        cachecraft_tokens.FIGURE,
        cachecraft_orders.FIGURE,
        cachecraft_quality.FIGURE,
        cachecraft_ablation.FIGURE,
        contexts.FIGURE,
        frontier.FIGURE,
    )
}
"""Names to figures."""


def find_figure(name: str) -> Figure:
    """Raises InvalidRequestError, which lists the names, for an unknown one."""
    if name not in FIGURES:
        raise InvalidRequestError(f"There is no figure {name!r}; there are {', '.join(FIGURES)}.", param="name")
    return FIGURES[name]
