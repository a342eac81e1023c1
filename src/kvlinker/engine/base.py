"""What the rest of kvlinker knows of an engine: requests in, events out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.chunks import Chunk
from kvlinker.errors import InvalidRequestError, KVLinkerError
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 1000),
}
_WHOLE = ("top_k", "max_tokens", "logprobs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the names and defaults are OpenAI's and vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``min_p`` 0 are off. ``logprobs`` None gives none, k gives the
    sampled token's and the k best alternatives'. ``max_tokens`` None means up to the context window.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidRequestError, naming the parameter, for values out of range."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InvalidRequestError(f"{name} is {value!r}, but must be from {low} to {high}.", param=name)
            if name in _WHOLE and not isinstance(value, int):
                raise InvalidRequestError(f"{name} is {value!r}, but must be a whole number.", param=name)
            if name not in _WHOLE:
                object.__setattr__(self, name, float(value))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequestError(f"stop is {self.stop!r}, but must be texts that are not empty.", param="stop")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. ``tenant`` decides whose chunk caches it may link."""

    prompt: Prompt
    policy: Policy
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token before any sampling filter; ``text`` is the token alone, decoded."""

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt tokens by what became of them: cached + recomputed + fresh is the prompt's length."""

    cached_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    output_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.recomputed_tokens + self.fresh_tokens

    @property
    def recomputed_fraction(self) -> float:
        """Tokens computed again over all that chunk caches held."""
        held = self.cached_tokens + self.recomputed_tokens
        return self.recomputed_tokens / held if held else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """How likely the tokens behind a prompt's last chunk are, each after all that stands before it, in nats.

    The first of them is left out: what stands before it is a chunk, whose last token a policy may not compute. Prompts
    without chunks are scored from their second token on. ``token_ids`` and ``logprobs`` are [scored]; ``top_ids`` and
    ``top_logprobs`` [scored, top] are the most likely tokens, best first, as many as were asked for.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    usage: Usage

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -float(self.logprobs.mean(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds.

    ``queue``: until its first step; ``load``: fetching (or computing again) its chunks' KV; ``link``: from the
    first step to the first token; ``decode``: from the first token to the last.
    """

    queue: float = 0.0
    load: float = 0.0
    link: float = 0.0
    decode: float = 0.0

    @property
    def ttft(self) -> float:
        return self.queue + self.load + self.link


@dataclass(frozen=True, slots=True)
class Delta:
    """New output: ``text`` may be empty while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that was served. ``reason`` is ``stop``, ``length`` or ``cancelled``."""

    reason: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be served."""

    error: KVLinkerError


GenerationEvent = Delta | Finished | Failed
Sink = Callable[[GenerationEvent], None]


class RequestHandle(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Stop computing and free the slots at once; a ``Finished("cancelled")`` event follows. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is: request counts, and KV slots (one slot holds one token)."""

    running: int
    waiting: int
    slots_used: int
    slots_total: int


class Engine(Protocol):
    """Creates chunk caches and generates from prompts. All methods may be called from any thread."""

    fingerprint: str
    """Names model weights, config, dtype and rope: a part of every chunk key."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""

    kv_bytes_per_token: int
    """What a token's KV takes as it is computed, over all layers."""

    def cache_chunk(self, chunk: Chunk, *, tenant: str) -> Future[int]:
        """Make sure that the store holds the chunk's KV; the result is its size in bytes.

        Computed at most once however many callers ask at the same time.
        """
        ...

    def generate(self, request: GenerationRequest, sink: Sink) -> RequestHandle:
        """Queue a request; its events go to ``sink`` in order, ``Finished`` or ``Failed`` last.

        Raises ContextLengthError, OverloadedError or EngineClosedError at once.
        """
        ...

    def explain(self, request: GenerationRequest) -> Future[Explanation]:
        """Link the request's prompt like ``generate``, and say how, without generating.

        Raises ContextLengthError, OverloadedError or EngineClosedError at once; later errors are the future's.
        """
        ...

    def score(self, request: GenerationRequest) -> Future[PromptLogprobs]:
        """Link the request's prompt like ``generate``, and say how likely its last tokens are, without generating.

        ``request.sampling.logprobs`` counts the alternatives that are told with each token. Raises InvalidRequestError
        when fewer than two tokens stand behind the last chunk, and ContextLengthError, OverloadedError or
        EngineClosedError at once; later errors are the future's.
        """
        ...

    def load(self) -> EngineLoad: ...

    def prefill_seconds(self, tokens: int) -> float | None:
        """What computing a prompt of so many tokens takes, going by what was computed; None where nothing was."""
        ...

    @property
    def healthy(self) -> bool:
        """False once the engine was closed or has failed for good."""
        ...

    def close(self) -> None:
        """Stop the engine; what is under way fails with EngineClosedError. Idempotent."""
        ...
