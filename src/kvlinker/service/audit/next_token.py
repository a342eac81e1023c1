"""Compares the distributions of a token under two computations: whether they agree, and how far
they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.answers import TokenLogprob

NEGLIGIBLE = 1e-6
"""Probability mass below the rounding error of a sum of fp32 probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class NextToken:
    """Holds the distribution of a token: the most likely ones, best first; all others share the
    remaining mass."""

    ids: NDArray[np.int64]
    """Token ids, [k]."""
    logprobs: NDArray[np.float64]
    """Their log-probabilities, [k]."""

    @classmethod
    def of(cls, top: Sequence[TokenLogprob]) -> NextToken:
        """Take a distribution as an engine reports it."""
        ids = np.array([entry.token_id for entry in top], dtype=np.int64)
        return cls(ids, np.array([entry.logprob for entry in top], dtype=np.float64))


def agree(reference: NextToken, other: NextToken) -> bool:
    """Return whether both find the same token the most likely."""
    return bool(reference.ids[0] == other.ids[0])


def kl_divergence(reference: NextToken, other: NextToken) -> float:
    """Return KL(reference || other) in nats, with all tokens that are not listed in both taken as
    one.

    That is exact where both list the whole vocabulary, and else a lower bound (merging outcomes
    never adds divergence). 0 for a distribution and itself.
    """
    _, mine, theirs = np.intersect1d(
        reference.ids, other.ids, assume_unique=True, return_indices=True
    )
    p, q = np.exp(reference.logprobs[mine]), np.exp(other.logprobs[theirs])
    divergence = float((p * (reference.logprobs[mine] - other.logprobs[theirs])).sum())
    rest, rest_of_other = 1 - float(p.sum()), 1 - float(q.sum())
    if rest > NEGLIGIBLE:
        divergence += rest * float(np.log(rest / max(rest_of_other, NEGLIGIBLE)))
    return max(divergence, 0.0)
