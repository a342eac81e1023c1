"""All figures by name, in the order of the page."""

from __future__ import annotations

from kvlinker.errors import InvalidRequestError
from kvlinker.research.figures import contexts, frontier
from kvlinker.research.figures.cacheblend import attention, deviation, layers, ratio, retrieved
from kvlinker.research.figures.cachecraft import ablation, orders, overhead, positions, recomputed, scores, tokens
from kvlinker.research.figures.epic import accuracy, length, splitting
from kvlinker.research.figures.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        accuracy.FIGURE,
        length.FIGURE,
        splitting.FIGURE,
        retrieved.FIGURE,
        attention.FIGURE,
        deviation.FIGURE,
        layers.FIGURE,
        ratio.FIGURE,
        positions.FIGURE,
        scores.FIGURE,
        overhead.FIGURE,
        tokens.FIGURE,
        orders.FIGURE,
        recomputed.FIGURE,
        ablation.FIGURE,
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
