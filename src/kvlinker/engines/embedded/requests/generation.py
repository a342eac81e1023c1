"""Requests for a prompt: links it, takes the tokens to compute from the link, and samples an answer
until it ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from typing import ClassVar

import numpy as np
from torch import Tensor

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.events import Events
from kvlinker.base.types.answers import Delta, Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import AnswerKV, GenerationRequest, Sink
from kvlinker.engines.contract.observation import ChunkWatch, QuestionProbe
from kvlinker.engines.contract.output import End, Output, RequestClock
from kvlinker.engines.embedded.decoding.grammars import GrammarGuide
from kvlinker.engines.embedded.decoding.logprobs import Head, LogprobCollector, first_scored
from kvlinker.engines.embedded.decoding.sampling import Sampler
from kvlinker.engines.embedded.execution.batch import SharedChunk
from kvlinker.engines.embedded.execution.capturing import AnswerCapture, Recorder, RecordingRoom
from kvlinker.engines.embedded.kv_cache.paths import linked_path
from kvlinker.engines.embedded.kv_cache.states import kept_positions
from kvlinker.engines.embedded.model.anatomy import keeping
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.request import Ending, Request, ResultKind
from kvlinker.engines.embedded.requests.sequence import FindPath, Refining, TokenSequence
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.link import Link
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import Prompt, Range, ranges
from kvlinker.store.loading.arriving import KV

NoteLinked = Callable[["PromptRequest"], object]
"""Notes that a request's prompt has just been computed; called once per prompt, in the engine's
thread."""


class PromptRequest(Request):
    """A request for a linked prompt: an answer, an explanation or log probabilities."""

    kind = ResultKind.ANSWER

    keys: Mapping[int, str] = {}
    """The keys of the chunks that its prompt names, by their ids."""

    explains: ClassVar[bool] = False
    """True if the figures that a policy decides by are recorded."""

    reuses = False
    """True if it reuses the KV of earlier requests, and leaves its own to later ones."""

    def __init__(
        self,
        request: GenerationRequest,
        loaded: LoadedModel,
        *,
        max_tokens: int = 0,
        linked: NoteLinked | None = None,
        head: Head | None = None,
        top: int = 0,
    ) -> None:
        """``max_tokens`` is the most tokens to generate; ``linked`` is called when the prompt is
        computed. ``head`` computes the log probabilities of the prompt's last tokens, with those of
        the ``top`` likeliest in their places; None where they are not asked for."""
        super().__init__()
        self.request = request
        self.tenant = request.tenant
        self.workflow = request.workflow
        self.clock = RequestClock()
        self.link: Link | None = None
        self.resident_only = False
        """True if chunks that are not in memory are computed rather than loaded, since loading them
        has failed before."""

        self.made: set[Chunk] = set()
        """The chunks whose KV was computed for this very request."""

        # without attention, all tokens are computed alike in all layers
        self._layers = max(1, len(loaded.layers))
        self._attends = bool(loaded.layers)
        self._keeps_states = bool(loaded.anatomy.recurrences)
        self._cost = loaded.cost
        self._max_tokens = max_tokens
        self._unlinked = ranges(~request.prompt.cached)
        self._linked = linked
        self._head = head
        self._top = min(top, loaded.vocabulary)
        self._scored: LogprobCollector | None = None
        self._linked_keys: Sequence[str] = ()
        self._attention: QuestionProbe | None = None

    @property
    def pending(self) -> Sequence[Range]:
        """The positions that are left to compute; before the prompt is linked, its fresh tokens."""
        return self._unlinked if self.sequence is None else self.sequence.pending

    @property
    def refinement(self) -> Refinement | None:
        """The driver of a policy that refines, which knows what it dropped in each layer; None
        before the first step and for other policies."""
        return None if self.sequence is None else self.sequence.refinement

    def mark_started(self) -> None:
        if self.clock.started is None:
            self.clock.started = perf_counter()

    def lose(self) -> None:
        self.sequence = self.link = self.clock.started = None
        self.resident_only = True

    def make_sequence(
        self, link: Link, kvs: Sequence[KV], keys: Sequence[str], restored: Sequence[KV | None] = ()
    ) -> TokenSequence:
        """Return the sequence to compute for this request, linked by ``link`` from the KV of its
        chunks. ``keys`` are those of all chunks of the prompt; ``restored`` has the KV that it
        reuses from disk, None if it is lost."""
        self.clock.loaded = perf_counter()
        self._linked_keys = tuple(keys)
        assert link.plan is not None
        prompt = link.plan.prompt
        if self.request.shows_attention and self._attends:
            self._attention = self._probe(prompt)
        return TokenSequence(
            prompt.tokens,
            link.plan.runs,
            shared=[
                SharedChunk(kv, placed.start, placed.rotary_start, placed.first, placed.last)
                for placed, kv in link.placed(kvs)
            ],
            path=self._path(link),
            reused=prompt.reused,
            restored=(
                ()
                if prompt.reused is None
                else tuple(zip(prompt.reused.stored, restored, strict=True))
            ),
            most_tokens=len(prompt) + self._max_tokens,
            answer=self._record_answer(len(prompt)) if self.request.keeps_answer else None,
            probe=self._probe(prompt) if link.probing else None,
            refine=self._refine(link),
            logprobs=None if self._head is None else self._score(prompt, self._head),
            observer=self._attention,
            marks=self._marks(prompt) if self._keeps_states else (),
        )

    def advance(self, logits: Tensor | None) -> Ending | None:
        assert self.sequence is not None
        assert self.link is not None
        if self.sequence.probe is not None:
            self.link = self.link.with_attention(self.sequence.probe.attention)
            assert self.link.plan is not None
            self.sequence.relink(
                self.link.plan.runs, self._refine(self.link), self._path(self.link)
            )
            return None
        if self.refinement is not None and self.refinement.error is not None:
            raise self.link.failed(self.refinement.error)
        assert logits is not None, "only a first pass wants none"
        if self._linked is not None:
            self._linked(self)
            self._linked = None
        return self._accept(logits)

    def _usage(self, output_tokens: int = 0) -> Usage:
        """Count the prompt's tokens by how they were computed, without those that are left to
        compute; zeros before the first step."""
        if self.clock.started is None or self.link is None:
            return Usage(0, 0, 0)
        usage = self.link.usage(self.refinement, output_tokens=output_tokens, made=self.made)
        if self.sequence is None:
            return usage
        usage, left = usage.without(self.sequence.missed), self.sequence.unfinished_prompt
        again = min(int(self.link.prompt.cached[left].sum()), usage.recomputed_tokens)
        return replace(
            usage,
            recomputed_tokens=usage.recomputed_tokens - again,
            fresh_tokens=max(0, usage.fresh_tokens - (len(left) - again)),
        )

    def _explanation(self) -> Explanation:
        """Explain how the prompt was linked, which has been computed."""
        assert self.link is not None
        assert self.sequence is not None
        reused = self.link.prompt.reused
        return self.link.explanation(
            self.refinement,
            layers=self._layers,
            cost=self._cost,
            made=self.made,
            missed=None if reused is None else reused.own[len(reused.own) - self.sequence.missed :],
            attention=None if self._attention is None else self._attention.attention,
        )

    def _path(self, link: Link) -> FindPath | None:
        """Return what finds the path that the KV of the linked prompt depends on; None if it is not
        kept."""
        assert link.plan is not None
        if not self.reuses:
            return None
        return partial(linked_path, self.request.sharer, link.plan, self._linked_keys)

    def _probe(self, prompt: Prompt) -> QuestionProbe:
        return QuestionProbe(np.zeros((self._layers, len(prompt)), dtype=np.float32))

    def _score(self, prompt: Prompt, head: Head) -> LogprobCollector:
        """Return a collector of the log probabilities of ``prompt``, as the policy arranged it."""
        self._scored = LogprobCollector(
            prompt.tokens, head, first=first_scored(prompt), top=self._top
        )
        return self._scored

    def _marks(self, prompt: Prompt) -> Sequence[int]:
        """Return the positions at which its state is kept for later prompts."""
        return ()

    def _record_answer(self, start: int) -> Recorder | None:
        """Return the collector of the KV of the answer, which begins at this position."""
        return None

    def _refine(self, link: Link) -> Callable[[], Refining] | None:
        if link.probing or not link.policy.needs.refines:
            return None
        return partial(
            _refining, link, self._layers, explains=self.explains or self.request.explains
        )

    def _forget(self) -> None:
        """Release the chunks' KV: a caller who keeps the request's handle must not keep it in
        memory, and layers that have not arrived need not be read for this request."""
        if self.sequence is not None:
            for kv in self.sequence.arriving:
                kv.give_up()
        self.sequence = self.link = None

    @abstractmethod
    def _accept(self, logits: Tensor) -> Ending | None:
        """Continue with the last token's ``logits`` [vocabulary]."""


def _refining(link: Link, layers: int, *, explains: bool) -> Refining:
    watch = (
        ChunkWatch(link.prompt.spans, len(link.prompt))
        if link.policy.needs.chunk_attention
        else None
    )
    refinement = link.refinement(layers, watch=watch, explains=explains)
    assert refinement is not None
    return Refining(refinement, watch)


class Generation(PromptRequest):
    """One answer: samples its tokens, decides when it ends, and sends events to the request's sink.

    The first of several answers links and computes the prompt; the others ``fork`` from it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        loaded: LoadedModel,
        max_tokens: int,
        events: Events,
        linked: NoteLinked | None,
        cancel: Callable[[Sequence[Request]], None],
        room: RecordingRoom,
        later: Callable[[Callable[[], None]], None],
        head: Head | None = None,
        guide: Callable[[], GrammarGuide] | None = None,
        first: Generation | None = None,
        choice: int = 0,
    ) -> None:
        """``cancel`` ends all choices when the sink fails. An answer that is to be kept takes
        ``room`` meanwhile. ``later`` makes the calls of the sink. With a ``head``, all of the
        prompt is computed. ``guide`` makes what guides a choice through the request's grammar.
        ``first`` is given to all choices but that one."""
        sampling = request.sampling_of(choice)
        super().__init__(
            request,
            loaded,
            max_tokens=max_tokens,
            linked=linked,
            head=head,
            top=sampling.prompt_logprobs or 0,
        )
        self.choice = choice
        if first is not None:
            self.clock = first.clock
        self._endings = (
            frozenset() if sampling.ignore_eos and guide is None else loaded.eos_token_ids
        )
        self._guide = None if guide is None else guide()
        self._room = room
        self._answer: AnswerCapture | None = None
        self._kv_layers = len(keeping(loaded.layers)) if request.keeps_answer else 0
        self._end: End | None = None  # reported once the KV of the last token is there
        self.reuses = head is None
        self._turn_ends = loaded.eos_token_ids
        self._output = Output(
            request,
            sink,
            choice=choice,
            clock=self.clock,
            tokenizer=loaded.tokenizer,
            events=events,
            broken=lambda: cancel(self.choices),
            later=later,
        )
        self._forks: tuple[Generation, ...] = ()
        if first is None:
            for other in range(1, request.n):
                fork = Generation(
                    request,
                    sink,
                    loaded=loaded,
                    max_tokens=max_tokens,
                    events=events,
                    linked=None,
                    cancel=cancel,
                    room=room,
                    later=later,
                    head=head,
                    guide=guide,
                    first=self,
                    choice=other,
                )
                self._forks = (*self._forks, fork)
            for generation in (self, *self._forks):
                generation.choices = (self, *self._forks)

    @cached_property
    def _sampler(self) -> Sampler:
        """Chooses the tokens; made for the first one, since a request may end before."""
        sampling = self.request.sampling_of(self.choice)
        return Sampler(
            sampling,
            prompt_length=len(self.request.prompt),
            endings=self._endings.union(sampling.stop_token_ids),
            bad_words=self.request.bad_words,
        )

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

    def _forget(self) -> None:
        super()._forget()
        self._answer = None

    def _marks(self, prompt: Prompt) -> Sequence[int]:
        return kept_positions(prompt, self._turn_ends) if self.reuses else ()

    def _record_answer(self, start: int) -> Recorder:
        self._answer = AnswerCapture(self._kv_layers, start, self._room)
        return self._answer

    def _accept(self, logits: Tensor) -> Ending | None:
        """Sample the next token and pass it on."""
        assert self.sequence is not None
        if self._end is not None:
            return self._report_end(*self._end)
        if not self._max_tokens:
            return self._report_end("length")
        allowed = None
        if self._guide is not None:
            allowed = self._guide.allowed()
            if allowed is None:
                return self._report_end("stop", self._output.rest())
        sequence = self.sequence
        row = logits.numpy()
        token = self._sampler.sample(row, lambda: sequence.tokens, allowed)
        logprob = self._sampler.logprob(row, token, self._output.token_text)
        logprobs = () if logprob is None else (logprob,)
        if token in self._endings or self._output.stops_at(token):
            end = self._output.push(token, logprobs, ends="stop")
        else:
            is_last = self._output.tokens + 1 >= self._max_tokens
            is_whole = is_last and self._guide is not None and self._guide.completed_by(token)
            ends = "length" if is_last and not is_whole else None
            end = self._output.push(token, logprobs, ends=ends)
            if end is None and is_whole:
                end = "stop", self._output.rest()
            if end is not None and self._answer is not None:
                self._end, end = end, None
        if end is not None:
            return self._report_end(*end)
        if self._guide is not None and self._end is None:
            self._guide.accept(token)
        sequence.append(token)
        return None

    def _answer_kv(self) -> AnswerKV | None:
        """Return the answer's KV where it is to be kept and all of it is there."""
        if self._answer is None:
            return None
        assert self.sequence is not None
        assert self.link is not None
        start, tokens = self.sequence.prompt_length, self.sequence.tokens.copy()
        if self._answer.tokens != len(tokens) - start:
            return None
        return AnswerKV(tokens[:start], tokens[start:], self.link.is_inexact, self._answer.part)

    def _report_end(self, reason: str, last: Delta | None = None) -> Ending:
        """Return the function that reports the answer's end. Its report is computed before, so that
        a policy that cannot explain fails this request alone."""
        usage = self._usage(self._output.tokens)
        scored = None if self._scored is None else self._scored.result(usage)
        explains = self.request.explains and self.choice == 0
        explanation = self._explanation() if explains else None
        report = partial(
            self._output.finish,
            reason,
            usage,
            last,
            prompt_logprobs=scored,
            explanation=explanation,
            answer_kv=self._answer_kv(),
        )
        return partial(self._finish, report)

    def _finish(self, report: Callable[[], None]) -> None:
        report()
        self._forget()
