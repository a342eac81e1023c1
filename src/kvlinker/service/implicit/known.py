"""Finds the texts of known chunks inside longer ones, wherever they stand."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, defaultdict

import numpy as np
from numpy.typing import NDArray

from kvlinker.prompting.segments import Span

WINDOW = 32
"""The characters of a window, by whose hash texts are found."""

MOST_TEXTS = 4096
"""The most texts that are known of one tenant; those that were added or found last stay."""

MOST_COMPARED = 8
"""How often, on average, a character of a text may be compared before the search ends."""

LEAST_WORK = 16_384
"""The characters that may be compared in any text, however short."""

DIGEST_COST = 64
"""The characters that are read in the time of one more comparison."""

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
        codes = np.frombuffer(_encoded(text), dtype="<u4").astype(np.uint64)
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


class KnownTexts:
    """Knows texts by the hash of their first characters, their length and their SHA-256; it keeps
    no text.

    Not thread safe.
    """

    def __init__(self, windows: WindowHash) -> None:
        self._windows = windows
        self._texts: OrderedDict[tuple[int, int, bytes], None] = (
            OrderedDict()
        )  # window, length, SHA-256
        self._lengths: defaultdict[int, dict[int, set[bytes]]] = defaultdict(
            dict
        )  # by window, then by length
        self._begins: np.ndarray[tuple[int], np.dtype[np.uint64]] | None = (
            None  # the windows, ascending
        )

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: str) -> None:
        """Add a text to those that are found, unless it is shorter than a window."""
        if len(text) < WINDOW:
            return
        window = int(self._windows.of(text[:WINDOW])[0])
        known = window, len(text), hashlib.sha256(_encoded(text)).digest()
        if known not in self._texts:
            self._lengths[window].setdefault(len(text), set()).add(known[2])
            self._begins = None
        self._texts[known] = None
        self._texts.move_to_end(known)
        if len(self._texts) > MOST_TEXTS:
            self._forget(*self._texts.popitem(last=False)[0])

    def find(self, text: str) -> list[Span]:
        """Return where known texts stand between words, ascending and apart: from left to right the
        longest that begins there. Each is verified by its SHA-256."""
        if not self._texts or len(text) < WINDOW:
            return []
        if self._begins is None:
            self._begins = np.array(sorted(self._lengths), dtype=np.uint64)
        windows = self._windows.of(text)
        places = np.searchsorted(self._begins, windows).clip(max=len(self._begins) - 1)
        starts = np.flatnonzero(self._begins[places] == windows).tolist()
        if not starts:
            return []
        data = memoryview(_encoded(text))
        found: list[Span] = []
        end, compared = 0, 0
        for start in starts:
            if start < end or _within_word(text, start):
                continue
            if compared > LEAST_WORK + MOST_COMPARED * len(text):
                break
            length, work = self._longest(text, data, start, int(windows[start]))
            compared += work
            if length:
                end = start + length
                found.append((start, end))
        return found

    def _longest(self, text: str, data: memoryview, start: int, window: int) -> tuple[int, int]:
        """Return the length of the longest known text at ``start``, 0 for none, and the work in
        characters."""
        digest, read, longest, work = hashlib.sha256(), 0, 0, 0
        for length in sorted(self._lengths[window]):
            if start + length > len(text):
                break
            digest.update(data[4 * (start + read) : 4 * (start + length)])
            work += length - read + DIGEST_COST
            read = length
            value = digest.copy().digest()
            if value in self._lengths[window][length] and not _within_word(text, start + length):
                longest = length
                self._texts.move_to_end((window, length, value))
        return longest, work

    def _forget(self, window: int, length: int, digest: bytes) -> None:
        lengths = self._lengths[window]
        lengths[length].discard(digest)
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[window]
        self._begins = None


def _within_word(text: str, place: int) -> bool:
    """Return whether a cut before this character would cut a word in two."""
    return 0 < place < len(text) and text[place - 1].isalnum() and text[place].isalnum()


def _encoded(text: str) -> bytes:
    """Return the text with four bytes to a character."""
    return text.encode("utf-32-le", errors="surrogatepass")


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
