"""The contract of engines, the only part of them that the rest of kvlinker uses: requests in,
events out. ``RequestLimits`` and the functions beside it check requests before they are queued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    OverloadedError,
    PolicyError,
)
from kvlinker.base.types.answers import Delta, PromptLogprobs, Timing, Usage
from kvlinker.base.types.chunks import Chunk, KeptAnswer
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.policy import Policy
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.segments import Prompt

if TYPE_CHECKING:
    from kvlinker.store.chunk_kv import ChunkKV


STEP_TOKENS = 2048
"""The largest number of tokens of a step by default: it keeps a GPU busy."""

RETRY_AFTER_SECONDS = 1
"""The seconds after which a refused request may be sent again."""


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
