"""Chooses the next token of one answer: the likeliest, or one that is drawn.

It is the engine's thread that chooses, between two steps, so that nothing else is computed
meanwhile: rows of logits are NumPy's, whose operations on one row take a fraction of PyTorch's, and
what few requests ask for is left to transformers' logits processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.answers import TokenLogprob
from kvlinker.base.types.sampling import SamplingParams

Row = NDArray[np.float32]
"""A number for each token: [vocabulary]."""

BLOCK = 256
"""The numbers of a block. Rows have some hundred thousand numbers; to search them block by block
first takes a fraction of the time that sorting or summing them up takes."""

CANDIDATE = np.float32(2**-10)
"""Tokens that are so likely, as a multiple of the likeliest one, are mostly all that ``top_p``
leaves."""

ROUNDING = 1e-4
"""The part of a token by which a sum may fall short of a share."""


def largest(row: Row, count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` largest numbers, the largest first: [count]. Of equal
    numbers the first ones go first, as in ``argmax``."""
    if not 0 < count < len(row):
        return np.argsort(-row, kind="stable")[:count]
    found = np.flatnonzero(row >= _largest(row, count))
    return found[np.argsort(-row[found], kind="stable")][:count]


def _largest(row: Row, count: int) -> np.float32:
    """Return the last one of the ``count`` largest numbers, which are in those ``count`` blocks
    whose largest numbers are the largest."""
    whole = len(row) // BLOCK * BLOCK
    if count * BLOCK < whole:
        blocks = row[:whole].reshape(-1, BLOCK)
        best = np.argpartition(blocks.max(axis=1), -count)[-count:]
        row = np.concatenate((blocks[best].ravel(), row[whole:]))
    return np.float32(np.partition(row, -count)[-count])


def at_point(weights: Row, point: float) -> int:
    """Return where a ``point`` from 0 to 1 lies if all lie one behind the other, each as long as
    its weight: the index of one of the weights above 0, of which there are some."""
    whole = len(weights) // BLOCK * BLOCK
    sums = weights[:whole].reshape(-1, BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.append(sums, weights[whole:].sum(dtype=np.float64)).cumsum()
    wanted = point * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    if block == len(ends):
        return int(np.flatnonzero(weights)[-1])
    before = ends[block - 1] if block else 0.0
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    found = int(np.searchsorted(before + inside.cumsum(dtype=np.float64), wanted, side="right"))
    if found == len(inside):  # the block's sum was rounded otherwise
        found = int(np.flatnonzero(inside)[-1])
    return block * BLOCK + found


def likelihoods(
    scores: Row,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Row:
    """Return how likely each token is, as a multiple of the likeliest one: [vocabulary].

    exp((score − largest) / temperature); 0 for all but the ``top_k`` likeliest, for all but the
    fewest of these that have a share of ``top_p`` together, and for those under ``min_p``. Of
    tokens that are as likely as each other, the first ones are kept.
    """
    with np.errstate(over="ignore"):  # scores that are as low as can be
        found: Row = scores - scores.max()
        if temperature != 1:
            found /= np.float32(temperature)
    np.exp(found, out=found)
    if 0 < top_k < len(found):
        found = _only(found, largest(found, top_k))
    if top_p < 1:
        found = _nucleus(found, top_p)
    if min_p:
        found *= found >= np.float32(min_p)
    return found


def _nucleus(likely: Row, share: float) -> Row:
    """Return the likelihoods with 0 for all but the fewest tokens that have this share together."""
    total = float(likely.sum(dtype=np.float64))
    candidates = likely[likely >= CANDIDATE]
    outside = total - float(candidates.sum(dtype=np.float64))
    if outside > (1 - share) * total:
        candidates, outside = likely, 0.0
    ascending = np.sort(candidates)
    point = ((1 - share) * total - outside) / (total - outside)
    least = ascending[at_point(ascending, point)]
    found: Row = likely * (likely >= least)
    surplus = (float(found.sum(dtype=np.float64)) - share * total) / float(least)
    if surplus + ROUNDING >= 1:
        equal = np.flatnonzero(found == least)
        first = 0 if (found > least).any() else 1
        found[equal[max(len(equal) - math.floor(surplus + ROUNDING), first) :]] = 0
    return found


def _only(likely: Row, kept: NDArray[np.int64]) -> Row:
    found = np.zeros_like(likely)
    found[kept] = likely[kept]
    return found


class Sampler:
    """Turns one answer's logits into tokens, with a seed reproducibly, whatever the batch around
    it."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int,
        endings: Collection[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """``endings`` are the tokens that end the answer, which do not come before
        ``params.min_tokens``; ``bad_words`` are the sequences of tokens that never come."""
        self._params = params
        self._prompt_length = prompt_length
        self._allowed = (
            None if params.allowed_token_ids is None else np.array(params.allowed_token_ids)
        )
        self._processors = LogitsProcessorList()
        if params.logit_bias:
            bias = {(token,): float(value) for token, value in params.logit_bias.items()}
            self._processors.append(SequenceBiasLogitsProcessor(bias))
        if bad_words:
            self._processors.append(
                NoBadWordsLogitsProcessor([list(tokens) for tokens in bad_words])
            )
        if params.min_tokens and endings:
            self._processors.append(
                MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, sorted(endings))
            )
        if params.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        self._penalises = bool(params.presence_penalty or params.frequency_penalty)
        seed = None if params.seed is None else int(params.seed) % 2**63
        self._random = None if params.greedy else np.random.default_rng(seed)

    def sample(
        self,
        logits: Row,
        tokens: Callable[[], NDArray[np.int64]],
        allowed: NDArray[np.bool_] | None = None,
    ) -> int:
        """Choose the next token by its ``logits`` [vocabulary].

        ``tokens`` gives prompt and output so far: [tokens]; ``allowed`` [vocabulary] the tokens
        that a grammar lets come, None for all. Raises InvalidRequestError where no token is left,
        and KVLinkerError for logits with NaN or infinity.
        """
        scores = logits
        if self._processors:
            scores = self._processed(scores, tokens())
        if self._penalises:
            scores = self._penalised(scores, tokens()[self._prompt_length :])
        if allowed is not None:
            scores = np.where(allowed, scores, np.float32(-np.inf))
        if self._allowed is not None:
            kept = scores[self._allowed]
            scores = np.full_like(scores, -np.inf)
            scores[self._allowed] = kept
        best = int(scores.argmax())
        if not scores[best] < np.inf:
            raise KVLinkerError(
                "The model's logits are not all finite: they hold NaN or infinity. Compare it with"
                " its own forward pass by `kvlinker check`, or serve it with dtype 'float32'."
            )
        if scores[best] == -np.inf:
            raise InvalidRequestError(
                "No token is left to choose: what the request forbids is all that could come."
                " Change 'bad_words', 'allowed_token_ids', 'min_tokens' or the grammar."
            )
        return best if self._random is None else self._drawn(scores, self._random.random())

    def logprob(
        self, logits: Row, token: int, text_of: Callable[[int], str]
    ) -> TokenLogprob | None:
        """Return the log probabilities of the token and of the best alternatives, if the request
        wants them."""
        if self._params.logprobs is None:
            return None
        greatest = logits.max()
        total = float(greatest) + float(np.log(np.exp(logits - greatest).sum()))
        best = largest(logits, min(self._params.logprobs, len(logits)))
        top = tuple(
            TokenLogprob(index, text_of(index), value - total)
            for index, value in zip(best.tolist(), logits[best].tolist(), strict=True)
        )
        return TokenLogprob(token, text_of(token), float(logits[token]) - total, top)

    def _processed(self, scores: Row, tokens: NDArray[np.int64]) -> Row:
        """Return the scores as transformers' processors change them."""
        changed = self._processors(torch.from_numpy(tokens)[None], torch.from_numpy(scores)[None])
        found: Row = changed[0].numpy()
        return found

    def _penalised(self, scores: Row, generated: NDArray[np.int64]) -> Row:
        """Return the scores with OpenAI's penalties, which count ``generated`` tokens only.

        score ← score − frequency_penalty · count − presence_penalty · [count > 0]
        """
        found, counts = np.unique(generated, return_counts=True)
        scores = scores.copy()
        scores[found] -= self._params.frequency_penalty * counts + self._params.presence_penalty
        return scores

    def _drawn(self, scores: Row, point: float) -> int:
        """Return the token at this point, from 0 to 1, of all that may come, each as long as it is
        likely."""
        params = self._params
        likely = likelihoods(
            scores,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        return at_point(likely, point)
