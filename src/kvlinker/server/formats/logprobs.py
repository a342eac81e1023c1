"""Log probabilities in JSON, which knows no infinity."""

from __future__ import annotations

LEAST = -9999.0
"""OpenAI's value for a token that cannot be."""


def finite(logprob: float) -> float:
    return max(logprob, LEAST)
