"""Answers as plain values: pieces of output, their text and calls, log probabilities, usage and
timing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.tools import ToolCall


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Holds the log probability of one token before any sampling filter, in nats."""

    token_id: int

    text: str
    """The token alone, decoded."""

    logprob: float

    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens in its place, best first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts prompt tokens by how they were computed: cached + recomputed + fresh is the prompt's
    length."""

    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    output_tokens: int = 0

    exact_cached_tokens: int = 0
    """The part of ``cached_tokens`` that an earlier request computed in the same sequence, not in
    chunks."""

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.recomputed_tokens + self.fresh_tokens

    def without(self, missed: int) -> Usage:
        """Return the usage after ``missed`` tokens of an earlier request's KV were evicted and are
        computed again."""
        return replace(
            self,
            cached_tokens=self.cached_tokens - missed,
            exact_cached_tokens=self.exact_cached_tokens - missed,
            fresh_tokens=self.fresh_tokens + missed,
        )

    @property
    def recomputed_fraction(self) -> float:
        """The share of tokens computed again among all that chunk caches held."""
        held = self.cached_tokens + self.recomputed_tokens
        return self.recomputed_tokens / held if held else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The log probabilities, in nats, of the tokens after a prompt's last chunk, each given all
    tokens before it.

    The first token after the chunk is left out, because a policy may not compute the chunk's last
    token. Prompts without chunks are scored from their second token on. ``token_ids`` and
    ``logprobs`` are [scored]; ``top_ids`` and ``top_logprobs`` [scored, top] are the most likely
    tokens, best first, as many as were asked for.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    usage: Usage

    @property
    def loss(self) -> float:
        """The mean negative log probability, in nats per token."""
        return -float(self.logprobs.mean(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Timing:
    """The parts of a request's time, in seconds."""

    queue: float = 0.0
    """Seconds until its first step, without loading."""

    load: float = 0.0
    """Seconds of fetching its chunks' KV, or computing it again."""

    link: float = 0.0
    """Seconds from the first step to the first token."""

    decode: float = 0.0
    """Seconds from the first token to the last."""

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.queue + self.load + self.link


@dataclass(frozen=True, slots=True)
class Delta:
    """Brings new output; ``text`` may be empty while a character or a possible stop string is
    incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Holds new output of an answer in a conversation: text, or a part of a call (its beginning,
    more of its arguments, or its end)."""

    kind: Literal["content", "reasoning", "call", "arguments", "called"]

    text: str = ""
    """The text; of a call that begins, the function's name."""

    call_id: str = ""
    """The id of a call that begins."""


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Holds the joined pieces of an answer. Where the answer was cut inside a call, the arguments
    of the last one are the beginning of a JSON object."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    calls_complete: bool
    """True if there are calls, and the last one is complete."""

    @classmethod
    def of(cls, pieces: Iterable[AnswerPiece]) -> Self:
        """Join pieces; the order of text and calls is lost."""
        texts = {"content": "", "reasoning": ""}
        calls: list[ToolCall] = []
        complete = False
        for piece in pieces:
            match piece.kind:
                case "call":
                    calls.append(ToolCall(piece.call_id, piece.text, ""))
                    complete = False
                case "arguments":
                    calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.text)
                case "called":
                    complete = True
                case kind:
                    texts[kind] += piece.text
        return cls(texts["content"], texts["reasoning"], tuple(calls), complete)
