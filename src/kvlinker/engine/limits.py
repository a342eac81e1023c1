"""What one model can be asked for; the engine checks requests before it queues them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.engine.contract import GenerationRequest
from kvlinker.errors import ContextLengthError, InvalidRequestError
from kvlinker.prompt.segments import Prompt


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """``vocabulary``: token ids that there are. ``max_model_len``: tokens that prompt and answer may have together."""

    vocabulary: int
    max_model_len: int

    def check_vocabulary(self, tokens: NDArray[np.int64], *, param: str) -> None:
        """Raises InvalidRequestError for an unknown id in ``tokens`` [length]: it would fail all requests of its step.

        ``param``: the request's field that the tokens come from.
        """
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            bad = int(tokens[(tokens < 0) | (tokens >= self.vocabulary)][0])
            raise InvalidRequestError(
                f"Token id {bad} is not in the model's vocabulary: ids go from 0 to {self.vocabulary - 1}.", param=param
            )

    def max_tokens(self, request: GenerationRequest) -> int:
        """How many tokens the answer may have: as many as were asked for, or as there is room for.

        Raises InvalidRequestError, and ContextLengthError where prompt and answer are too long together.
        """
        self.check_vocabulary(request.prompt.tokens, param="prompt")
        length = len(request.prompt)
        room = self.max_model_len - length
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {length} tokens, which leaves no room for an answer: prompt and answer together take "
                f"at most {self.max_model_len} tokens. Shorten the prompt.",
                param="messages",
            )
        wanted = request.sampling.max_tokens
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"The prompt has {length} tokens and max_tokens is {wanted}; together they exceed "
                f"{self.max_model_len}. Ask for at most {room} tokens or shorten the prompt.",
                param="max_tokens",
            )
        return room if wanted is None else wanted

    def check_scorable(self, prompt: Prompt) -> None:
        """Raises InvalidRequestError where no token can be scored, and ContextLengthError for a prompt too long."""
        self.check_vocabulary(prompt.tokens, param="prompt")
        fresh = len(prompt) - max((span.end for span in prompt.spans), default=0)
        if fresh < 2:
            raise InvalidRequestError(
                f"There is nothing to score: {fresh} tokens stand behind the last chunk, but at least 2 must. "
                "The first one is never scored.",
                param="prompt",
            )
        if len(prompt) > self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens, but the model takes {self.max_model_len}. Shorten the prompt.",
                param="prompt",
            )
