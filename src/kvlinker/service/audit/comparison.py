"""Compares an answer, token by token, with the full computation of the same tokens: whether both
find the same one the most likely, and how far their distributions are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.answers import PromptLogprobs, TokenLogprob, Usage
from kvlinker.prompting.segments import Prompt

CHUNK_BOUNDS = (1, 2, 5, 17)
"""The fewest chunks of a prompt in each class of prompts by number of chunks."""

TOKEN_BOUNDS = (0, 1024, 4096, 16384)
"""The fewest tokens of a prompt in each class of prompts by length."""

NEGLIGIBLE = 1e-6
"""Probability mass below the rounding error of a sum of fp32 probabilities."""


class RequestKind(NamedTuple):
    """The kind of a request, as figures are kept by it."""

    chunks: str
    """The class by the number of its prompt's chunks, such as ``2-4``."""

    tokens: str
    """The class by its prompt's length in tokens, such as ``1024-4095``."""

    implicit: bool
    """True if none of its chunks was named by an id."""

    @classmethod
    def of(cls, prompt: Prompt, *, implicit: bool) -> RequestKind:
        """Return the kind of a request for this prompt."""
        return cls(
            _class(len(prompt.chunks), CHUNK_BOUNDS), _class(len(prompt), TOKEN_BOUNDS), implicit
        )


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


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer as it was given, and the distributions that its tokens were chosen from."""

    prompt: Prompt
    policy: str
    tenant: str
    kind: RequestKind

    greedy: bool
    """True if the most likely token was always chosen, whatever else the request says."""

    token_ids: tuple[int, ...]
    """The answer's tokens, the one that ended it included."""

    next_tokens: tuple[NextToken, ...]
    """The distribution of each token; of the one that ended the answer there may be none."""

    usage: Usage

    @property
    def sequence(self) -> NDArray[np.int64]:
        """The tokens of prompt and answer, [length]."""
        return np.concatenate([self.prompt.tokens, np.asarray(self.token_ids, dtype=np.int64)])

    @property
    def comparable(self) -> int:
        """The number of the answer's first tokens that can be compared: those whose most likely one
        is known."""
        known = len(self.next_tokens)
        ends_known = self.greedy and known == len(self.token_ids) - 1
        return known + ends_known


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a linked answer compares with the full computation of the same tokens. KL is in nats,
    from the full computation's distribution to the linked one's."""

    agrees: bool
    """True if both find the same first token the most likely."""

    kl: float | None
    """The divergence of the first token's distributions; None if the answer ended with its first
    token."""

    answer_kl: float | None
    """The mean divergence along the given answer; None if there is no distribution."""

    divergence: int | None
    """The index of the first token at which both find different ones the most likely; None if there
    is none."""

    @property
    def alike(self) -> bool:
        """True if the full computation finds the same token the most likely all along the
        answer."""
        return self.divergence is None


def compare(answer: ServedAnswer, reference: PromptLogprobs) -> Comparison:
    """Compare an answer, at least one of whose tokens is comparable, with the ``reference``, which
    scores all of its tokens after its prompt."""
    rows = zip(reference.top_ids, reference.top_logprobs.astype(np.float64), strict=True)
    full = [NextToken(ids, logprobs) for ids, logprobs in rows]
    linked_best = [int(each.ids[0]) for each in answer.next_tokens] + [answer.token_ids[-1]]
    differs = (
        index for index in range(answer.comparable) if int(full[index].ids[0]) != linked_best[index]
    )
    divergence = next(differs, None)
    kls = [
        kl_divergence(mine, theirs) for mine, theirs in zip(full, answer.next_tokens, strict=False)
    ]
    return Comparison(
        agrees=divergence != 0,
        kl=kls[0] if kls else None,
        answer_kl=fmean(kls) if kls else None,
        divergence=divergence,
    )


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


def _class(number: int, bounds: Sequence[int]) -> str:
    """Return the class, between two ``bounds`` or after the last, that ``number`` is in."""
    for low, high in pairwise(bounds):
        if number < high:
            return f"{low}" if high == low + 1 else f"{low}-{high - 1}"
    return f"{bounds[-1]}+"
