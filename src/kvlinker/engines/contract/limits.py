"""The limits of an engine, and the errors of requests that exceed them; requests are checked before
they are queued."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
    PolicyError,
)
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.prompting.segments import Prompt

STEP_TOKENS = 2048
"""The largest number of tokens of a step by default: it keeps a GPU busy."""

RETRY_AFTER_SECONDS = 1
"""The seconds after which a refused request may be sent again."""


def engine_closed() -> EngineClosedError:
    """Return the error of requests that reach an engine which is shutting down, was shut down, or
    has failed."""
    return EngineClosedError(
        "The engine is shutting down, or has failed. Send the request again in a moment, or to"
        " another server."
    )


def check_room(queued: int, choices: int, *, most: int) -> None:
    """Check that ``choices`` more fit after the ``queued`` ones, with room for ``most``.

    Raises OverloadedError, or InvalidRequestError for more choices than an idle engine has room
    for.
    """
    if choices > most:
        raise InvalidRequestError(
            f"n is {choices}, but this server has room for {most} choices at once. Ask for fewer.",
            param="n",
        )
    if queued + choices > most:
        raise OverloadedError(
            f"{queued} requests are queued already, and there is room for {most}. Try again later.",
            retry_after=RETRY_AFTER_SECONDS,
        )


def check_wait(before: float, own: float, *, most: float) -> None:
    """Check that a request gives its first token within ``most`` seconds: its prompt takes ``own``
    seconds, and those ``before`` it. A prompt that takes longer alone is accepted if no other is
    before it.

    Raises OverloadedError, to be tried again when so much of the others is done that it would be in
    time.
    """
    if before > 0 and before + own > most:
        raise OverloadedError(
            f"The first token is expected after {before + own:.1f} seconds, but this server answers"
            f" within {most:g}. Try again later.",
            retry_after=max(RETRY_AFTER_SECONDS, math.ceil(min(before, before + own - most))),
        )


def check_supported(reason: str | None) -> None:
    """Raise PolicyError with the ``reason`` why an engine does not support a request's policy, if
    there is one."""
    if reason is not None:
        raise PolicyError(reason, param="link.policy")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checks requests against the limits of one model."""

    vocabulary: int
    """The size of the vocabulary: token ids are 0 to this, exclusive."""

    max_model_len: int
    """The most tokens that a prompt and its answer may have together."""

    max_answer_tokens: int | None = None
    """The most tokens that an answer may have; None for no limit but the window's."""

    def check_vocabulary(self, tokens: NDArray[np.int64], *, param: str) -> None:
        """Check the ids in ``tokens`` [length]. Raises InvalidRequestError for an unknown one: it
        would fail all requests of its step.

        ``param`` names the request's field that the tokens come from.
        """
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            bad = int(tokens[(tokens < 0) | (tokens >= self.vocabulary)][0])
            raise InvalidRequestError(
                f"Token id {bad} is not in the model's vocabulary: ids go from 0 to"
                f" {self.vocabulary - 1}.",
                param=param,
            )

    def max_tokens(self, request: GenerationRequest) -> int:
        """Return the most tokens that the answer may have: as many as were asked for, or as there
        is room for, up to the limit of answers.

        Raises InvalidRequestError, also for tokens in the sampling parameters that are not in the
        vocabulary, and ContextLengthError if prompt and answer are too long together.
        """
        sampling = request.sampling
        self.check_vocabulary(request.prompt.tokens, param="prompt")
        for param in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if tokens := getattr(sampling, param):
                self.check_vocabulary(np.array(list(tokens), dtype=np.int64), param=param)
        length = len(request.prompt)
        room = self.max_model_len - length
        if room < (0 if request.sampling.max_tokens == 0 else 1):
            raise ContextLengthError(
                f"The prompt has {length} tokens, which leaves no room for an answer: prompt and"
                f" answer together take at most {self.max_model_len} tokens. Shorten the prompt.",
                param="messages",
            ).exceeding(length, self.max_model_len)
        wanted = sampling.max_tokens
        most = self.max_answer_tokens
        if most is not None and wanted is not None and wanted > most:
            raise InvalidRequestError(
                f"{wanted} tokens are asked for, but this server's answers have at most {most}. Ask"
                " for fewer.",
                param="max_tokens",
            )
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"The prompt has {length} tokens and {wanted} more are asked for; together they"
                f" exceed {self.max_model_len}. Ask for at most {room} tokens or shorten the"
                " prompt.",
                param="max_tokens",
            )
        if wanted is not None:
            return wanted
        return room if most is None else min(room, most)

    def check_whole(self, tokens: NDArray[np.int64], first: int) -> None:
        """Check ``tokens`` [length] to compute whole and score from position ``first`` on. Raises
        InvalidRequestError if no token can be scored, and ContextLengthError for more tokens than
        the model takes."""
        self.check_vocabulary(tokens, param="tokens")
        if not 1 <= first < len(tokens):
            raise InvalidRequestError(
                f"There is nothing to score from position {first} of {len(tokens)} tokens on: give"
                f" one from 1 to {len(tokens) - 1}.",
                param="first",
            )
        if len(tokens) > self.max_model_len:
            raise ContextLengthError(
                f"There are {len(tokens)} tokens, but the model takes {self.max_model_len}. Give"
                " fewer.",
                param="tokens",
            )

    def check_scorable(self, prompt: Prompt) -> None:
        """Check a prompt to score. Raises InvalidRequestError if no token can be scored, and
        ContextLengthError for a prompt that is too long."""
        self.check_vocabulary(prompt.tokens, param="prompt")
        fresh = len(prompt) - max((span.end for span in prompt.spans), default=0)
        if fresh < 2:
            raise InvalidRequestError(
                f"There is nothing to score: {fresh} tokens follow the last chunk, but at"
                " least 2 must. The first one is never scored.",
                param="prompt",
            )
        if len(prompt) > self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens, but the model takes {self.max_model_len}."
                " Shorten the prompt.",
                param="prompt",
            )
