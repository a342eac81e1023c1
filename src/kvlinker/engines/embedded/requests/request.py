"""Defines a request: one thing to compute for a caller, with its state, its kind and its place
among others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Generic, TypeVar

from torch import Tensor

from kvlinker.base.errors import EngineClosedError, KVLinkerError
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.prompting.segments import Range
from kvlinker.store.chunk_store import Hold

T = TypeVar("T")

Ending = Callable[[], None]
"""Reports to the caller how the request ended. Called once, after its slots are free."""


class RequestState(Enum):
    """The state of a request between its arrival and its end. Only the scheduler changes it."""

    LOADING = "loading"
    """The KV of its chunks is not there, or has too few layers to begin."""

    READY = "ready"
    """The request waits for slots."""

    RUNNING = "running"
    """The request holds slots, and steps compute it."""

    PREEMPTED = "preempted"
    """The request has freed its slots for others, and starts again when there are slots."""

    FINISHED = "finished"
    """The request has ended: completed, cancelled or failed."""


class ResultKind(Enum):
    """The kind of result that a request asks for, in order of priority."""

    ANSWER = 0
    CHUNK = 1
    VARIANT = 2

    BACKGROUND = 3
    """Computed a piece at a time, and only in steps without other requests."""


class Request(ABC):
    """One thing to compute, from its arrival to its end. The scheduler alone writes its state,
    number, urgency and hold, its predictions for it, and its place among others."""

    kind: ResultKind

    tenant = ""
    """The tenant whose share of the engine it uses."""

    workflow: str | None = None
    """The tenant's name for the requests that it belongs to."""

    chunk_bytes: Mapping[str, int] = {}
    """The bytes of the chunks that its prompt names, by key."""

    choice = 0
    """The index of this request among the answers to one prompt; the first one links the prompt for
    all."""

    choices: Sequence[Request] = ()
    """All answers to the same prompt, where there are several."""

    identity: object = None
    """Requests with equal identities are computed once, for all callers; a request whose identity
    is None is never shared."""

    state = RequestState.LOADING

    sequence: TokenSequence | None = None
    """The tokens to compute; None until the request is loaded."""

    hold: Hold | None = None
    """Keeps the chunks that it uses in memory, from before they are fetched until the request
    ends."""

    urgent = False
    """True if an answer waits for it."""

    has_yielded = False
    """True if it was once preempted for a request that waited for its slots."""

    number: int | None = None
    """The order of arrival; None before that."""

    arrived = 0.0
    """The time of arrival, in seconds on the scheduler's clock."""

    began = 0.0
    """The time at which its workflow began, at the earliest some seconds before it arrived."""

    backlog = 0.0
    """The predicted seconds of the prompts of its tenant that come before it."""

    prompt_seconds = 0.0
    """The predicted seconds of computing its prompt."""

    seconds_left = 0.0
    """The predicted seconds of computing the rest of its prompt."""

    deferral = 0.0
    """The seconds for which it lets answers go first that arrive later."""

    due = 0.0
    """The time, on the scheduler's clock, that orders the requests of one tenant."""

    turn = 0.0
    """The time, on the scheduler's clock, after which no newcomer is admitted before it."""

    order: tuple[float, ...] = ()
    """Its place among waiting requests of its kind: the smallest comes first."""

    @property
    def waits(self) -> bool:
        """True for an answer that has no slots and has not ended."""
        return self.kind is ResultKind.ANSWER and self.state not in (
            RequestState.RUNNING,
            RequestState.FINISHED,
        )

    @property
    def pending(self) -> Sequence[Range]:
        """The positions [begin, end) of its prompt that are left to compute, as far as they are
        known."""
        return () if self.sequence is None else self.sequence.pending

    def mark_started(self) -> None:  # noqa: B027
        """Note that a step with the request's tokens begins."""

    def lose(self) -> None:  # noqa: B027
        """Forget the KV of chunks, some of which never came: the request is loaded again."""

    def fork(self) -> Sequence[Request]:
        """Return the other choices, whose prompt has now been computed with this one's; empty from
        the second call on."""
        return ()

    @abstractmethod
    def advance(self, logits: Tensor | None) -> Ending | None:
        """Continue once all tokens so far are computed, with the last token's ``logits``
        [vocabulary] if it has any.

        Returns the function that reports the end, if the request ended. An exception ends the
        request, too.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Report that the request ended because it was cancelled."""

    @abstractmethod
    def fail(self, error: KVLinkerError) -> None:
        """Report that the request ended with ``error``."""


class FutureRequest(Request, Generic[T]):
    """A request whose result is a single value, which ``future`` has once it is there."""

    cancellation = "The request was cancelled."
    """The message of the future's error if the request was cancelled."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()
        # callers cannot cancel it under the engine's hands
        self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        self.fail(EngineClosedError(self.cancellation))

    def fail(self, error: KVLinkerError) -> None:
        self.future.set_exception(error)
