"""Retrieval from one example's own passages, by the words of its question."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

K1, B = 1.5, 0.75
"""How fast repeated words saturate, and how much long passages are held against."""


def retrieve(question: str, passages: Sequence[str], count: int) -> tuple[str, ...]:
    """The ``count`` passages that rank highest for the question by Okapi BM25, in their own order.

    Words are compared in lower case. Of equal scores, the earlier passage is taken.
    """
    words = [Counter(words_of(passage)) for passage in passages]
    lengths = np.array([counts.total() for counts in words], dtype=np.float64)
    relative = lengths / max(float(lengths.mean()), 1.0) if len(words) else lengths
    scores = np.zeros(len(words))
    for word in set(words_of(question)):
        occurrences = np.array([counts[word] for counts in words], dtype=np.float64)
        holding = int((occurrences > 0).sum())
        rarity = np.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
        scores += rarity * occurrences * (K1 + 1) / (occurrences + K1 * (1 - B + B * relative))
    best = np.argsort(-scores, kind="stable")[:count]
    return tuple(passages[index] for index in sorted(best))


def words_of(text: str) -> list[str]:
    """Its words in lower case."""
    return re.findall(r"\w+", text.lower())
