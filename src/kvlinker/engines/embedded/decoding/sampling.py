"""Chooses the next token of one answer, with transformers' logits processors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import TokenLogprob
from kvlinker.base.types.sampling import SamplingParams


class OutputPenalty(LogitsProcessor):  # type: ignore[misc]
    """Applies OpenAI's presence and frequency penalties, which count generated tokens only.

    logit ← logit − frequency_penalty · count − presence_penalty · [count > 0]
    """

    def __init__(self, prompt_length: int, *, presence: float, frequency: float) -> None:
        self._prompt_length = prompt_length
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the ``scores`` [1, vocabulary] with penalties for what is generated in
        ``input_ids`` [1, tokens]."""
        generated = input_ids[0, self._prompt_length :]
        counts = torch.bincount(generated, minlength=scores.shape[-1])[None].to(scores)
        return scores - self._frequency * counts - self._presence * (counts > 0)


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
        self._logprobs = params.logprobs
        self._greedy = params.greedy
        self._allowed = (
            None if params.allowed_token_ids is None else torch.tensor(params.allowed_token_ids)
        )
        self._processors = LogitsProcessorList()
        self._warpers = LogitsProcessorList()
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
        if params.presence_penalty or params.frequency_penalty:
            self._processors.append(
                OutputPenalty(
                    prompt_length,
                    presence=params.presence_penalty,
                    frequency=params.frequency_penalty,
                )
            )
        if not self._greedy:
            self._add_warpers(params)
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed % 2**63)

    def sample(
        self, logits: Tensor, tokens: Callable[[], Tensor], allowed: Tensor | None = None
    ) -> int:
        """Choose the next token by its ``logits`` [vocabulary], fp32, on the CPU.

        ``tokens`` gives prompt and output so far: [tokens]; ``allowed`` [vocabulary] the tokens
        that a grammar lets come, None for all. Raises InvalidRequestError where no token is left.
        """
        history = tokens()[None] if self._processors or self._warpers else None
        scores = self._processors(history, logits[None])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        if self._allowed is not None:
            kept = scores[:, self._allowed]
            scores = torch.full_like(scores, -torch.inf).index_copy(1, self._allowed, kept)
        best = scores.argmax()
        if scores[0, best] == -torch.inf:
            raise InvalidRequestError(
                "No token is left to choose: what the request forbids is all that could come."
                " Change 'bad_words', 'allowed_token_ids', 'min_tokens' or the grammar."
            )
        if self._greedy:
            return int(best)
        scores = self._warpers(history, scores)
        probabilities = torch.softmax(scores[0], dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def logprob(
        self, logits: Tensor, token: int, text_of: Callable[[int], str]
    ) -> TokenLogprob | None:
        """Return the log probabilities of the token and of the best alternatives, if the request
        wants them."""
        if self._logprobs is None:
            return None
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.topk(min(self._logprobs, len(logprobs)))
        top = tuple(
            TokenLogprob(index, text_of(index), value)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        )
        return TokenLogprob(token, text_of(token), float(logprobs[token]), top)

    def _add_warpers(self, params: SamplingParams) -> None:
        if params.temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            self._warpers.append(MinPLogitsWarper(params.min_p))
