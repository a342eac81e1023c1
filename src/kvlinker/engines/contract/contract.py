"""The contract of engines, the only part of them that the rest of kvlinker uses: requests in,
events out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.answers import Delta, PromptLogprobs, Timing, Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.context_cache import KeptAnswer
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.policy import Policy
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.segments import Prompt

if TYPE_CHECKING:
    from kvlinker.store.chunk_kv import ChunkKV


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to link, and the number of answers to generate from it.

    ``tenant`` decides whose chunk caches may be linked. The prompt is linked once for all ``n``
    choices, which are then independent of one another.
    """

    prompt: Prompt
    policy: Policy
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = "default"
    n: int = 1

    salt: str = ""
    """The salt of the requests that alone may reuse what this one computes of its sequence."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """The sequences of tokens that ``sampling.bad_words`` are encoded as."""

    explains: bool = False
    """True if the first choice's ``Finished`` is to explain how the prompt was linked."""

    shows_attention: bool = False
    """True if explanations are to have the question's attention in each layer, where the engine can
    measure it."""

    keeps_answer: bool = False
    """True if the first choice's ``Finished`` is to have the answer's KV."""

    calls: Callable[[], Reader] | None = None
    """Makes readers that say when an answer is over, by the calls in its text; None if it has
    none."""

    workflow: str | None = None
    """The tenant's name for the requests that this one belongs to; the engine may have them come
    together."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidRequestError(f"n is {self.n}, but must be at least 1.", param="n")

    @property
    def sharer(self) -> str:
        """The name by which sequences are kept apart: those of equal names may reuse each
        other's KV."""
        return f"{self.tenant}\0{self.salt}" if self.salt else self.tenant

    def sampling_of(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of this choice (0 to n - 1): with a seed, choice i uses
        seed + i."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + choice)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerKV:
    """The KV of an answer, as it was generated."""

    prompt: NDArray[np.int64]
    """The token ids before it, as they were linked: [prompt]."""

    tokens: NDArray[np.int64]
    """The answer's token ids, without the one that ended it: [tokens]."""

    linked: bool
    """True if KV of chunks stood in the prompt that is not exact there."""

    part: Callable[[int, int], ChunkKV]
    """Returns the KV of the tokens [begin, end), with keys before rotary embedding. It takes a
    while: do not call it in the engine's thread."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a choice that was served. ``reason`` is ``stop``, ``length`` or
    ``cancelled``."""

    reason: str
    usage: Usage
    timing: Timing

    prompt_logprobs: PromptLogprobs | None = None
    """The log probabilities of the prompt's last tokens, where the request asked for them."""

    stop_string: str | None = None
    """The stop string that ended the answer; None if something else did."""

    explanation: Explanation | None = None
    """How the prompt was linked, if the request asked for it; the first choice has it."""

    answer_kv: AnswerKV | None = None
    """The answer's KV, where the request asked for it and the answer was not cancelled."""

    kept: KeptAnswer | None = None
    """The context cache of an answer that was to be kept; the engine's caller fills it in."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a choice that could not be served."""

    error: KVLinkerError


GenerationEvent = Delta | Finished | Failed

Sink = Callable[[int, GenerationEvent], None]
"""Takes the number of a choice (0 to n - 1) and its next event. An engine calls it from a thread of
its own."""


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A request under way, with all of its choices."""

    cancel: Callable[[], None]
    """Stops computing and frees the slots at once; each choice that has not ended gets
    ``Finished("cancelled")``. Idempotent."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine: counts of requests (each choice is one), and KV slots (one slot holds
    one token)."""

    running: int
    waiting: int
    slots_used: int
    slots_total: int
    slots_kept: int = 0
    """Slots that no request holds, and whose KV later ones may reuse."""


class Engine(Protocol):
    """Creates chunk caches and generates from prompts. All methods may be called from any
    thread."""

    fingerprint: str
    """The hash of the model's weights, config, dtype and rotary parameters; it is a part of every
    chunk key."""

    max_model_len: int
    """The most tokens that a prompt and its answer may have together."""

    parameters: int
    """The number of the model's weights; 0 where it is not known."""

    kv_bytes_per_token: int
    """The bytes of one token's KV over all layers, as it is computed."""

    computes_steps: str
    """The means by which steps of few tokens are computed: ``compiled``; or the model's modules,
    and why."""

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes that are stored of a chunk of ``tokens`` tokens, as computed."""

    def unsupported(self, policy: Policy) -> str | None:
        """Return why this engine cannot follow the policy, and the way out; None if it can.

        Requests under such a policy are refused with PolicyError.
        """

    def cache_chunk(self, chunk: Chunk, *, tenant: str, idle: bool = False) -> Future[int]:
        """Make sure that the store holds the chunk's KV; the result is its size in bytes. ``idle``:
        compute it only while there are no other requests, if the engine supports that.

        Computed at most once however many callers ask at the same time.
        """

    def expect_together(self, chunks: Sequence[Chunk], *, tenant: str) -> None:
        """Expect that these chunks will stand in prompts together: compute, while there is nothing
        else to do, their KV at places behind one another, if the engine supports that. Returns at
        once."""

    def settle(self) -> Future[None]:
        """Return a future that is done once the KV at later places is there, of chunks that were
        expected together or stood in prompts whose policy wants it. Other requests delay it."""

    def generate(self, request: GenerationRequest, sink: Sink) -> RequestHandle:
        """Queue a request, all of its choices or none. The events of each choice go to ``sink`` in
        order, ``Finished`` or ``Failed`` last; the prompt's usage is the same in all of them.

        Raises PolicyError, ContextLengthError, OverloadedError or EngineClosedError at once.
        """

    def expect_again(self, request: GenerationRequest, seconds: float) -> None:
        """Expect a request within ``seconds`` that begins as this one, which has ended. Of the KV
        that the tenant's requests have left, this one's is evicted last until then, and first
        afterwards. An engine whose KV belongs to another program does nothing."""

    def explain(self, request: GenerationRequest) -> Future[Explanation]:
        """Link the request's prompt like ``generate``, and explain how, without generating.
        Cancelling the future ends that; it may have an error then.

        Raises PolicyError, ContextLengthError, OverloadedError or EngineClosedError at once; later
        errors are the future's.
        """

    def score(self, request: GenerationRequest) -> Future[PromptLogprobs]:
        """Link the request's prompt like ``generate``, and return the log probabilities of its last
        tokens, without generating.

        ``request.sampling.logprobs`` is the number of alternatives per token. Raises
        InvalidRequestError when fewer than two tokens stand after the last chunk, and PolicyError,
        ContextLengthError, OverloadedError or EngineClosedError at once; later errors are the
        future's.
        """

    def score_whole(
        self, tokens: NDArray[np.int64], *, first: int, top: int, tenant: str
    ) -> Future[PromptLogprobs]:
        """Compute all of ``tokens`` [length], linking and reusing nothing, and return the log
        probabilities of those from position ``first`` (at least 1) on, each with the ``top`` most
        likely tokens in its place.

        It is computed while the engine has nothing else to do, so that it does not slow other
        requests and may take any time. Raises InvalidRequestError, ContextLengthError or
        EngineClosedError at once; later errors are the future's.
        """

    def current_load(self) -> EngineLoad:
        """Return the engine's current load."""

    def resident_keys(self) -> frozenset[str]:
        """Return the keys of chunks that the engine has in memory of its own, beyond the
        store's."""

    def prefill_seconds(self, tokens: int) -> float | None:
        """Return the expected seconds of computing a prompt of ``tokens`` tokens; None if nothing
        was measured."""

    @property
    def healthy(self) -> bool:
        """True while the engine serves; False once it was closed or has failed for good."""

    def close(self) -> None:
        """Stop the engine; running requests fail with EngineClosedError. Idempotent."""
