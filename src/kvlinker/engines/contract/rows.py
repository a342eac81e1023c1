"""Rows of chunks that are computed behind one another, for the KV of each at later places (ours).

Language models tell the things of a prompt apart by their place in a row (Feng and Steinhardt,
2023, "How do Language Models Bind Entities in Context?"). The KV of a chunk that was computed alone
says "the first in the row", so that several such chunks are mistaken for one another. KV that was
computed behind texts of its kind says at which place it stands.
"""

from __future__ import annotations

from kvlinker.base.types.chunks import LAST_PLACE

ROW = LAST_PLACE + 1
"""The most chunks in a row."""

CONTEXTS = 4
"""The most contexts whose mean the KV of a chunk at a place becomes: what the texts before it say
is noise, which the mean over several has less of, and their number is the signal."""


def circles(count: int) -> int:
    """Return in how many circles ``count`` chunks are computed, each of which has other
    neighbours."""
    return min(CONTEXTS, count - 1)


def orders(count: int, circle: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the orders in which ``count`` chunks are computed, as their indices: the circle of
    this number, begun with each of them, so that in as many orders each chunk stands at each place
    once."""
    around = [*range(count)]
    if circle & 2:
        around = around[::2] + around[1::2]
    if circle & 1:
        around.reverse()
    return tuple((*around[begin:], *around[:begin]) for begin in range(count))
