"""The requests that the engine computes: their states, their kinds, and those for a linked prompt."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from kvlinker.embedded.batch import SharedChunk
from kvlinker.embedded.grammars import GrammarGuide
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.embedded.paths import LinkedPath, linked_path
from kvlinker.embedded.sampling import Sampler
from kvlinker.embedded.scoring import Head, LogprobCollector, first_scored
from kvlinker.embedded.sequence import Refining, TokenSequence
from kvlinker.engine.contract import GenerationRequest, Sink
from kvlinker.engine.cost import CostModel
from kvlinker.engine.observation import ChunkWatch, QuestionProbe
from kvlinker.engine.output import Output, RequestClock
from kvlinker.errors import EngineClosedError, KVLinkerError
from kvlinker.events import Events
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.link import Link
from kvlinker.linking.plan import Placement, Range, ranges
from kvlinker.linking.refinement import Refinement
from kvlinker.prompt.segments import Prompt
from kvlinker.store.holds import Hold
from kvlinker.store.loading.arriving import KV
from kvlinker.types.answers import Delta, PromptLogprobs, Usage
from kvlinker.types.chunks import Chunk

T = TypeVar("T")

Ending = Callable[[], None]
"""Reports to the caller how the request ended. Called once, after its slots are free."""

CHUNK_DELAY = 10.0
"""The seconds that chunks for which no answer waits give to answers that arrive later."""

Linked = Callable[["LinkedRequest"], object]
"""Takes a request whose prompt has just been computed; called once per prompt, in the engine's thread."""


class State(Enum):
    """The state of a request between its arrival and its end. Only the scheduler changes it."""

    LOADING = "loading"
    """The KV of its chunks is not there, or has too few layers to begin."""

    READY = "ready"
    """It waits for slots."""

    RUNNING = "running"
    """It holds slots, and steps compute it."""

    PREEMPTED = "preempted"
    """It gave its slots up to others, and starts again when there are slots."""

    FINISHED = "finished"
    """It has ended: completed, cancelled or failed."""


class Kind(Enum):
    """The kind of result that a request asks for, in order of priority."""

    ANSWER = 0
    CHUNK = 1
    VARIANT = 2

    BACKGROUND = 3
    """Computed a piece at a time, and only in steps that nobody else needs."""


class Request(ABC):
    """One thing to compute, from its arrival to its end. The scheduler alone writes its state, number, urgency
    and hold, and what it predicts of it."""

    kind: ClassVar[Kind]

    tenant = ""
    """The tenant whose share of the engine it takes."""

    chunk_bytes: Mapping[str, int] = {}
    """The bytes of the chunks that its prompt names, by key."""

    choice = 0
    """The index of this request among the answers to one prompt; the first one links the prompt for all."""

    choices: Sequence[Request] = ()
    """All answers to the same prompt, where there are several."""

    identity: object = None
    """Requests with equal identities are computed once, for all who ask; a request whose identity is None is never
    shared."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.sequence: TokenSequence | None = None
        """The tokens to compute; None until the request is loaded."""

        self.number: int | None = None
        """The order of arrival; None before that."""

        self.arrived = 0.0
        """The time of arrival, in seconds on the scheduler's clock."""

        self.backlog = 0.0
        """The predicted seconds of the prompts of its tenant that come before it."""

        self.prompt_seconds = 0.0
        """The predicted seconds of computing its prompt."""

        self.seconds_left = 0.0
        """The predicted seconds of computing what is left of its prompt."""

        self.gave_way = False
        """True if it once gave its slots up to another tenant's request."""

        self.urgent = False
        """True if an answer waits for it."""

        self.hold: Hold | None = None
        """Keeps the chunks that it uses in memory, from before they are fetched until the request ends."""

    @property
    def deferral(self) -> float:
        """The seconds for which it lets answers come first that arrive later."""
        if self.kind in (Kind.VARIANT, Kind.BACKGROUND):
            return math.inf
        return CHUNK_DELAY if self.kind is Kind.CHUNK and not self.urgent else 0.0

    @property
    def due(self) -> float:
        """The time, on the scheduler's clock, that orders the requests of one tenant."""
        return self.arrived + self.deferral + self.prompt_seconds

    @property
    def turn(self) -> float:
        """The time, on the scheduler's clock, from which on nobody who arrives is admitted before it."""
        return self.due + self.backlog

    @property
    def waits(self) -> bool:
        """True for an answer that has no slots and has not ended."""
        return self.kind is Kind.ANSWER and self.state not in (State.RUNNING, State.FINISHED)

    @property
    def pending(self) -> Sequence[Range]:
        """The positions [begin, end) of its prompt that are left to compute, as far as they are known."""
        return () if self.sequence is None else self.sequence.pending

    @property
    def order(self) -> tuple[float, ...]:
        """Its place among waiting requests of its kind: the smallest comes first."""
        assert self.number is not None
        if self.kind is Kind.VARIANT:
            return (-self.number,)  # what was asked for last is likeliest to be asked for again
        return (not self.urgent, self.turn, self.number, self.choice)

    def mark_started(self) -> None:  # noqa: B027
        """Note that a step with the request's tokens begins."""

    def lose(self) -> None:  # noqa: B027
        """Forget the KV of chunks, some of which never came: the request is loaded again."""

    def fork(self) -> Sequence[Request]:
        """Return the other choices, whose prompt has now been computed with this one's; empty from the second call
        on."""
        return ()

    @abstractmethod
    def advance(self, logits: Tensor | None) -> Ending | None:
        """Continue once all tokens so far are computed, with the last token's ``logits`` [vocabulary] if it has any.

        Returns the function that reports the end, if the request ended. An exception ends the request, too.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Report that the request ended because it was cancelled."""

    @abstractmethod
    def fail(self, error: KVLinkerError) -> None:
        """Report that the request ended with ``error``."""


class LinkedRequest(Request):
    """A request for a linked prompt: an answer, an explanation or log probabilities."""

    kind = Kind.ANSWER

    _keys: tuple[str, ...] = ()

    explains: ClassVar[bool] = False
    """True if the figures that a policy decides by are recorded."""

    reuses = False
    """True if it reuses what requests before it computed, and leaves what it computes to later ones."""

    def __init__(self, request: GenerationRequest, *, layers: int, max_tokens: int, linked: Linked | None) -> None:
        """``layers`` is the number of the model's layers, ``max_tokens`` the most tokens to generate; ``linked`` is
        called when the prompt is computed."""
        super().__init__()
        self.request = request
        self.tenant = request.tenant
        self.clock = RequestClock()
        self.link: Link | None = None
        self.resident_only = False
        """True if chunks that are not in memory are computed rather than loaded, since loading them has failed
        before."""

        self.made: set[Chunk] = set()
        """The chunks whose KV was computed for this very request."""

        self._layers = layers
        self._max_tokens = max_tokens
        self._linked = linked
        self._attention: QuestionProbe | None = None

    @property
    def pending(self) -> Sequence[Range]:
        """The positions that are left to compute; before the prompt is linked, its fresh tokens."""
        return ranges(~self.request.prompt.cached) if self.sequence is None else self.sequence.pending

    @property
    def refinement(self) -> Refinement | None:
        """The driver of a policy that refines, which knows what it dropped in each layer; None before the first step
        and for other policies."""
        return None if self.sequence is None else self.sequence.refinement

    def mark_started(self) -> None:
        if self.clock.started is None:
            self.clock.mark_started()

    def lose(self) -> None:
        self.sequence = self.link = self.clock.started = None
        self.resident_only = True

    def make_sequence(self, link: Link, kvs: Sequence[KV], keys: Sequence[str]) -> TokenSequence:
        """Return the sequence to compute for this request, linked by ``link`` from the KV of its chunks. ``keys`` are
        those of all chunks of the prompt."""
        self.clock.mark_loaded()
        self._keys = tuple(keys)
        assert link.plan is not None
        prompt = link.plan.prompt
        if self.request.shows_attention:
            self._attention = QuestionProbe(self._layers, len(prompt))
        return TokenSequence(
            prompt.tokens,
            link.plan.runs,
            shared=[_shared(*entry) for entry in link.placed(kvs)],
            path=self._path(link),
            reused=prompt.reused,
            most_tokens=len(prompt) + self._max_tokens,
            probe=QuestionProbe(self._layers, len(prompt)) if link.probing else None,
            refine=self._refine(link),
            logprobs=self._collector(prompt),
            observer=self._attention,
        )

    def advance(self, logits: Tensor | None) -> Ending | None:
        assert self.sequence is not None
        assert self.link is not None
        if self.sequence.probe is not None:
            self.link = self.link.with_attention(self.sequence.probe.attention)
            assert self.link.plan is not None
            self.sequence.relink(self.link.plan.runs, self._refine(self.link), self._path(self.link))
            return None
        if self.refinement is not None and self.refinement.error is not None:
            raise self.link.failed(self.refinement.error)
        assert logits is not None, "only a first pass wants none"
        if self._linked is not None:
            self._linked(self)
            self._linked = None
        return self._accept(logits)

    def _usage(self, output_tokens: int = 0) -> Usage:
        """Count the prompt's tokens by how they were computed; zeros before the first step."""
        if self.clock.started is None or self.link is None:
            return Usage(0, 0, 0)
        usage = self.link.usage(self.refinement, output_tokens=output_tokens, made=self.made)
        return usage.without(0 if self.sequence is None else self.sequence.missed)

    def _explanation(self, cost: CostModel) -> Explanation:
        """Explain how the prompt was linked, which has been computed."""
        assert self.link is not None
        assert self.sequence is not None
        reused = self.link.prompt.reused
        return self.link.explanation(
            self.refinement,
            layers=self._layers,
            cost=cost,
            made=self.made,
            missed=None if reused is None else reused.own[len(reused.own) - self.sequence.missed :],
            attention=None if self._attention is None else self._attention.attention,
        )

    def _path(self, link: Link) -> LinkedPath | None:
        """Return what the KV of the linked prompt depends on; None if it is not kept."""
        assert link.plan is not None
        return linked_path(self.request.tenant, link.plan, self._keys) if self.reuses else None

    def _collector(self, prompt: Prompt) -> LogprobCollector | None:
        """Return a collector of the log probabilities of ``prompt`` (as the policy arranged it); None where the request
        wants none."""
        return None

    def _refine(self, link: Link) -> Callable[[], Refining] | None:
        if link.probing or not link.policy.needs.refines:
            return None
        return partial(_refining, link, self._layers, explains=self.explains or self.request.explains)

    def _forget(self) -> None:
        """Release the chunks' KV: a caller who keeps the request's handle must not keep it in memory, and layers that
        have not arrived need not be read for this request."""
        if self.sequence is not None:
            for kv in self.sequence.arriving:
                kv.give_up()
        self.sequence = self.link = None

    @abstractmethod
    def _accept(self, logits: Tensor) -> Ending | None:
        """Continue with the last token's ``logits`` [vocabulary]."""


def _shared(placement: Placement, kv: KV) -> SharedChunk:
    return SharedChunk(kv, placement.start, placement.rotary_start, placement.first, placement.last)


def _refining(link: Link, layers: int, *, explains: bool) -> Refining:
    watch = ChunkWatch(link.prompt.spans, len(link.prompt)) if link.policy.needs.chunk_attention else None
    refinement = link.refinement(layers, watch=watch, explains=explains)
    assert refinement is not None
    return Refining(refinement, watch)


class Generation(LinkedRequest):
    """One answer: samples its tokens, decides when it ends, and tells the request's sink.

    The first of several answers links and computes the prompt; the others ``fork`` from it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        loaded: LoadedModel,
        max_tokens: int,
        cost: CostModel,
        events: Events,
        linked: Linked | None,
        cancel: Callable[[Sequence[Request]], None],
        head: Head | None = None,
        guide: Callable[[], GrammarGuide] | None = None,
        first: Generation | None = None,
        choice: int = 0,
    ) -> None:
        """``cost`` counts the arithmetic that an explanation tells. ``cancel`` ends all choices when the sink fails.
        ``head`` computes the log probabilities of the prompt, all of which is computed then; None where they are not
        asked for. ``guide`` makes what guides a choice through the request's grammar. ``first`` is given to all choices
        but that one."""
        super().__init__(request, layers=len(loaded.layers), max_tokens=max_tokens, linked=linked)
        self.choice = choice
        if first is not None:
            self.clock = first.clock
        sampling = request.sampling_of(choice)
        self._endings = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos and guide is None else loaded.eos_token_ids
        )
        self._sampler = Sampler(
            sampling, prompt_length=len(request.prompt), endings=self._endings, bad_words=request.bad_words
        )
        self._guide = None if guide is None else guide()
        self._cost = cost
        self._head = head
        self._top = min(sampling.prompt_logprobs or 0, loaded.vocabulary)
        self._scored: LogprobCollector | None = None
        self.reuses = head is None
        self._output = Output(
            request,
            sink,
            choice=choice,
            clock=self.clock,
            tokenizer=loaded.tokenizer,
            events=events,
            broken=lambda: cancel(self.choices),
        )
        self._forks: tuple[Generation, ...] = ()
        if first is None:
            self._forks = tuple(
                Generation(
                    request,
                    sink,
                    loaded=loaded,
                    max_tokens=max_tokens,
                    cost=cost,
                    events=events,
                    linked=None,
                    cancel=cancel,
                    head=head,
                    guide=guide,
                    first=self,
                    choice=other,
                )
                for other in range(1, request.n)
            )
            for generation in (self, *self._forks):
                generation.choices = (self, *self._forks)

    def fork(self) -> Sequence[Generation]:
        forks, self._forks = self._forks, ()
        assert self.sequence is not None
        for fork in forks:
            fork.link, fork.sequence = self.link, self.sequence.fork()
            fork._scored = self._scored
        return forks

    def cancel(self) -> None:
        for generation in (self, *self._forks):
            generation._output.finish("cancelled", self._usage(generation._output.tokens))
        self._forget()

    def fail(self, error: KVLinkerError) -> None:
        for generation in (self, *self._forks):
            generation._output.fail(error)
        self._forget()

    def _collector(self, prompt: Prompt) -> LogprobCollector | None:
        if self._head is not None:
            self._scored = LogprobCollector(prompt.tokens, self._head, first=first_scored(prompt), top=self._top)
        return self._scored

    def _accept(self, logits: Tensor) -> Ending | None:
        """Sample the next token and pass it on."""
        assert self.sequence is not None
        if not self._max_tokens:
            return partial(self._finish, "length")
        allowed = None
        if self._guide is not None:
            allowed = self._guide.allowed()
            if allowed is None:
                return partial(self._finish, "stop", self._output.rest())
        sequence = self.sequence
        token = self._sampler.sample(logits, lambda: torch.from_numpy(sequence.tokens), allowed)
        if token in self._endings:
            end = self._output.push(token, ends="stop")
        else:
            is_last = self._output.tokens + 1 >= self._max_tokens
            logprob = self._sampler.logprob(logits, token, self._output.token_text)
            told = () if logprob is None else (logprob,)
            end = self._output.push(token, told, ends="length" if is_last else None)
        if end is not None:
            return partial(self._finish, *end)
        if self._guide is not None:
            self._guide.accept(token)
        sequence.append(token)
        return None

    def _finish(self, reason: str, last: Delta | None = None) -> None:
        usage = self._usage(self._output.tokens)
        scored = None if self._scored is None else self._scored.result(usage)
        explains = self.request.explains and self.choice == 0
        explanation = self._explanation(self._cost) if explains else None
        self._output.finish(reason, usage, last, prompt_logprobs=scored, explanation=explanation)
        self._forget()


class FutureRequest(LinkedRequest, Generic[T]):
    """A request whose result is a single value, ready when a generation would sample its first token."""

    def __init__(self, request: GenerationRequest, *, layers: int, max_tokens: int, linked: Linked | None) -> None:
        super().__init__(request, layers=layers, max_tokens=max_tokens, linked=linked)
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # callers cannot cancel it under the engine's hands

    def cancel(self) -> None:
        self.fail(EngineClosedError("The request was cancelled."))

    def fail(self, error: KVLinkerError) -> None:
        self._forget()
        self.future.set_exception(error)

    def _accept(self, logits: Tensor) -> Ending:
        return partial(self._finish, self._value())

    def _finish(self, value: T) -> None:
        self._forget()
        self.future.set_result(value)

    @abstractmethod
    def _value(self) -> T:
        """Return the request's result, now that its prompt is computed."""


class Explaining(FutureRequest[Explanation]):
    """Asks how a prompt is linked. It does not count as a use of its chunks."""

    explains = True

    def __init__(self, request: GenerationRequest, *, layers: int, cost: CostModel) -> None:
        super().__init__(request, layers=layers, max_tokens=1, linked=None)
        self._cost = cost

    def _value(self) -> Explanation:
        return self._explanation(self._cost)


class Scoring(FutureRequest[PromptLogprobs]):
    """Asks for the log probabilities of the tokens behind the last chunk; generates nothing."""

    def __init__(
        self, request: GenerationRequest, *, layers: int, head: Head, vocabulary: int, linked: Linked | None
    ) -> None:
        super().__init__(request, layers=layers, max_tokens=0, linked=linked)
        self._head = head
        self._top = min(request.sampling.logprobs or 0, vocabulary)
        self._collected: LogprobCollector | None = None

    def _collector(self, prompt: Prompt) -> LogprobCollector:
        self._collected = LogprobCollector(prompt.tokens, self._head, first=first_scored(prompt), top=self._top)
        return self._collected

    def _value(self) -> PromptLogprobs:
        assert self._collected is not None
        return self._collected.result(self._usage())
