"""All figures by name, in the order of the page."""

from __future__ import annotations

from kvlinker.errors import InvalidRequestError
from kvlinker.figures import cacheblend_ratio, contexts, epic_length, epic_splitting, epic_tradeoff, frontier
from kvlinker.figures.figure import Figure

_MODULES = (epic_tradeoff, epic_length, epic_splitting, cacheblend_ratio, contexts, frontier)

FIGURES: dict[str, Figure] = {module.FIGURE.name: module.FIGURE for module in _MODULES}
"""Names to figures."""


def find_figure(name: str) -> Figure:
    """Raises InvalidRequestError, which lists the names, for an unknown one."""
    if name not in FIGURES:
        raise InvalidRequestError(f"There is no figure {name!r}; there are {', '.join(FIGURES)}.", param="name")
    return FIGURES[name]
