"""What the rest of kvlinker knows of an engine: requests in, events out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from kvlinker.errors import KVLinkerError
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt
from kvlinker.types.answers import Delta, Finished, PromptLogprobs
from kvlinker.types.chunks import Chunk
from kvlinker.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. ``tenant`` decides whose chunk caches it may link."""

    prompt: Prompt
    policy: Policy
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = "default"


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
