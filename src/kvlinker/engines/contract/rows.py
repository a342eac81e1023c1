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


def orders(count: int) -> tuple[tuple[int, ...], ...]:
    """Return the orders in which ``count`` chunks are computed, as their indices: a circle, begun
    with each of them, so that in as many orders each chunk stands at each place once."""
    return tuple(tuple((begin + at) % count for at in range(count)) for begin in range(count))
