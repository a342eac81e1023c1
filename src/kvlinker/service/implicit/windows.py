"""Hashes all windows of a text at once, to find where known texts may begin."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

WINDOW = 32
"""The characters of a window."""

Hashes = NDArray[np.uint64]


class WindowHash:
    """Computes a polynomial hash modulo 2^64 of every window of ``WINDOW`` characters, with a
    random base per instance.

    Collisions can still be crafted, so callers must compare the actual text. Any thread may use it.
    """

    def __init__(self) -> None:
        self._base = secrets.randbits(64) | 1  # odd numbers have an inverse
        self._powers = np.ones(1, dtype=np.uint64)
        self._inverses = np.ones(1, dtype=np.uint64)

    def of(self, text: str) -> Hashes:
        """Return the hashes of the windows that begin at each character, [characters - WINDOW +
        1]."""
        codes = np.frombuffer(encoded(text), dtype="<u4").astype(np.uint64)
        count = len(codes) - WINDOW + 1
        if count <= 0:
            return np.empty(0, dtype=np.uint64)
        powers, inverses = self._tables(len(codes))
        sums = np.zeros(len(codes) + 1, dtype=np.uint64)
        np.cumsum(codes * powers[: len(codes)], out=sums[1:])
        return (sums[WINDOW:] - sums[:count]) * inverses[:count]

    def _tables(self, length: int) -> tuple[Hashes, Hashes]:
        """Return the powers of the base and of its inverse, at least ``length`` of each."""
        powers, inverses = self._powers, self._inverses
        if len(powers) < length or len(inverses) < length:
            size = max(length, 2 * len(powers))
            powers = _powers(self._base, size)
            inverses = _powers(pow(self._base, -1, 2**64), size)
            self._powers, self._inverses = powers, inverses
        return powers, inverses


def encoded(text: str) -> bytes:
    """Return the text with four bytes to a character."""
    return text.encode("utf-32-le", errors="surrogatepass")


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
