"""Answers a request: samples its tokens until it ends, and tells the caller of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.events import Events
from kvlinker.base.types.answers import Delta
from kvlinker.engines.contract.contract import AnswerKV, GenerationRequest, Sink
from kvlinker.engines.contract.output import End, Output
from kvlinker.engines.embedded.decoding.grammars import GrammarGuide
from kvlinker.engines.embedded.decoding.logprobs import Head
from kvlinker.engines.embedded.decoding.sampling import Sampler
from kvlinker.engines.embedded.execution.capturing import AnswerCapture, Recorder, RecordingRoom
from kvlinker.engines.embedded.kv_cache.states import worth_keeping
from kvlinker.engines.embedded.model.anatomy import keeping
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.prompt_request import Linked, PromptRequest
from kvlinker.engines.embedded.requests.request import Ending, Request
from kvlinker.prompting.segments import Prompt


class Generation(PromptRequest):
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
        events: Events,
        linked: Linked | None,
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
        self._sampler = Sampler(
            sampling,
            prompt_length=len(request.prompt),
            endings=self._endings.union(sampling.stop_token_ids),
            bad_words=request.bad_words,
        )
        self._guide = None if guide is None else guide()
        self._room = room
        self._answer: AnswerCapture | None = None
        self._keeping = len(keeping(loaded.layers))
        self._end: End | None = None  # told once the KV of the last token is there
        self.reuses = head is None
        self._turn_ends = loaded.eos_token_ids if loaded.anatomy.recurrences else None
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
            self._forks = tuple(
                Generation(
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

    def _forget(self) -> None:
        super()._forget()
        self._answer = None

    def _marks(self, prompt: Prompt) -> Sequence[int]:
        if self._turn_ends is None or not self.reuses:
            return ()
        return worth_keeping(prompt, self._turn_ends)

    def _answer_recorder(self, start: int) -> Recorder | None:
        if self.request.keeps_answer:
            self._answer = AnswerCapture(self._keeping, start, self._room)
        return self._answer

    def _accept(self, logits: Tensor) -> Ending | None:
        """Sample the next token and pass it on."""
        assert self.sequence is not None
        if self._end is not None:
            return self._ended(*self._end)
        if not self._max_tokens:
            return self._ended("length")
        allowed = None
        if self._guide is not None:
            allowed = self._guide.allowed()
            if allowed is None:
                return self._ended("stop", self._output.rest())
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
            return self._ended(*end)
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

    def _ended(self, reason: str, last: Delta | None = None) -> Ending:
        """Return the function that tells of the answer's end. What it tells is computed before, so
        that a policy that cannot explain fails this request alone."""
        usage = self._usage(self._output.tokens)
        scored = None if self._scored is None else self._scored.result(usage)
        explains = self.request.explains and self.choice == 0
        explanation = self._explanation() if explains else None
        tell = partial(
            self._output.finish,
            reason,
            usage,
            last,
            prompt_logprobs=scored,
            explanation=explanation,
            answer_kv=self._answer_kv(),
        )
        return partial(self._finish, tell)

    def _finish(self, tell: Callable[[], None]) -> None:
        tell()
        self._forget()
