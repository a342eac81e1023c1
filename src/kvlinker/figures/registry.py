"""All figures by name, in the order of the page."""

from __future__ import annotations

from kvlinker.errors import InvalidRequestError
from kvlinker.figures import cacheblend_ratio, epic_length, epic_splitting, epic_tradeoff
from kvlinker.figures.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (epic_tradeoff.FIGURE, epic_length.FIGURE, epic_splitting.FIGURE, cacheblend_ratio.FIGURE)
}
"""Names to figures."""


def find_figure(name: str) -> Figure:
    """Raises InvalidRequestError, which lists the names, for an unknown one."""
    if name not in FIGURES:
        raise InvalidRequestError(f"There is no figure {name!r}; there are {', '.join(FIGURES)}.", param="name")
    return FIGURES[name]
