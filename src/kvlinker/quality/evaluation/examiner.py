"""Runs examples under several policies, each compared with a full prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

import numpy as np

from kvlinker.base.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    PolicyError,
)
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.messages import ChatMessage
from kvlinker.linking import Policy, as_policy
from kvlinker.llm import LLM, Answer, ContentPart, Message
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.evaluation.examples import (
    REFERENCE,
    Continuation,
    Example,
    ExampleAnswer,
    ExampleResults,
    Question,
    Result,
    Scored,
    Skipped,
)
from kvlinker.service.audit.comparison import NextToken, agree, kl_divergence
from kvlinker.store import ContextCache
from kvlinker.store.format.byte_source import BufferSource
from kvlinker.store.format.chunk_file import decode_chunk, encode_chunk
from kvlinker.store.format.codecs import RAW, Codec

MOST_LOGPROBS = 1000
"""Tokens of a distribution that an engine reports at most."""

FORMAT_MARK = "@"
"""Stands between a policy and the format of the weights that it is asked with."""


@dataclass(frozen=True)
class Examiner:
    """Examines one model. Equal examples get equal results. May be called from several threads."""

    llm: LLM
    max_tokens: int | None = None
    """The longest answer in tokens, in place of the questions' own limits."""
    truncate: bool = False
    """True to take passages from the middle of contexts over the window, as LongBench does; else
    these are skipped."""
    one_by_one: bool = True
    """True to cache chunks one after the other, so that every run computes the same batches, and so
    the same bits."""
    prepare: Callable[[Question, Prompt], Prompt] | None = None
    """Exchanges the chunks of a question's prompt before it is asked, such as for variants."""
    unregistered: Mapping[str, Policy] = field(default_factory=dict)
    """Policies that are not registered, by the names they are asked under."""
    codec: Codec = RAW
    """The codec that chunks go through before they are used. Another than ``raw`` exchanges them in
    the store, so that ``examine`` may then be called from one thread only."""
    others: Mapping[str, Examiner] = field(default_factory=dict)
    """Examiners of the same model with its weights in other formats, by format: ``POLICY@FORMAT``
    is asked of them, and compared with this one's full prefill."""

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for an LLM whose requests reuse each other's prefixes: policies
        would be compared on what another one computed."""
        if self.llm.settings.prefix_cache == "on":
            raise InvalidRequestError(
                "An examination compares what each policy computes itself: open the LLM with"
                ' prefix_cache="off".',
                param="prefix_cache",
            )

    def require_supported(self, policies: Sequence[str]) -> None:
        """Raise PolicyError for a policy that the engine cannot follow: every example would be left
        out for all, each after its full prefill."""
        for policy in policies:
            name, _, form = policy.partition(FORMAT_MARK)
            engine = (self.others[form] if form else self).llm.engine
            if (reason := engine.unsupported(as_policy(self._policy(name)))) is not None:
                raise PolicyError(reason, param="policy")

    def examine(
        self, example: Example, policies: Sequence[str], together: Sequence[str] = ()
    ) -> ExampleResults:
        """Return the policies' results in their order, or why there are none: what fails once is
        left out for all.

        For policies that need KV at later places, the passages that come ``together`` are cached
        before; without them, the example's own are. Raises EngineClosedError, after which no
        example can be asked.
        """
        try:
            return self._results(example, policies, together or example.passages)
        except EngineClosedError:
            raise
        except KVLinkerError as error:
            return Skipped(f"{example.dataset} {example.id}", error.message)

    def _results(
        self, example: Example, policies: Sequence[str], together: Sequence[str]
    ) -> tuple[Result, ...]:
        for policy in policies:
            name, _, form = policy.partition(FORMAT_MARK)
            examiner = self.others[form] if form else self
            if as_policy(self._policy(name)).needs.places:
                examiner.llm.generate_context_cache(together)
                examiner.llm.engine.settle().result()
        trial = self._trial(example)
        full = trial.run(REFERENCE)
        other_trials = {form: other._trial(example) for form, other in self.others.items()}
        results = []
        for policy in policies:
            name, _, form = policy.partition(FORMAT_MARK)
            if form:
                run = other_trials[form].run(self._policy(name), full)
            else:
                run = full if policy == REFERENCE else trial.run(self._policy(policy), full)
            results.append(run.compare(full, example, policy))
        return tuple(results)

    def _trial(self, example: Example) -> QuestionTrial | ContinuationTrial:
        if isinstance(example, Question):
            return self._question(example)
        return self._continuation(example)

    def _question(self, example: Question) -> QuestionTrial:
        def build(chunks: Sequence[Chunk]) -> Prompt:
            return self.llm.builder.chat([ChatMessage("user", (*chunks, example.question))])

        limit = example.max_tokens if self.max_tokens is None else self.max_tokens
        passages = self._fit(example, limit, build)
        content = (*self._cache(passages), example.question)
        messages: Sequence[Message] | Prompt = [{"role": "user", "content": content}]
        if self.prepare is not None:
            messages = self.prepare(example, self.llm.chat_prompt(messages))
        return QuestionTrial.of(example, self.llm, messages, max_tokens=limit)

    def _continuation(self, example: Continuation) -> ContinuationTrial:
        def build(chunks: Sequence[Chunk]) -> Prompt:
            parts: list[str | Chunk] = [*self._bos(example), *chunks, example.continuation]
            return self.llm.builder.completion(parts)

        caches = self._cache(self._fit(example, 0, build))
        return ContinuationTrial(self.llm, (*self._bos(example), *caches, example.continuation))

    def _cache(self, passages: Sequence[str]) -> list[ContextCache]:
        batches: Sequence[Sequence[str]] = (
            [[passage] for passage in passages] if self.one_by_one else [passages]
        )
        caches = [cache for batch in batches for cache in self.llm.generate_context_cache(batch)]
        if self.codec.name != RAW.name:
            _recode(self.llm, caches, self.codec)
        return caches

    def _bos(self, example: Continuation) -> tuple[str, ...]:
        """Return the token that begins texts, unless the tokenizer puts it there itself or the
        first chunk has it."""
        tokenizer, builder = self.llm.tokenizer, self.llm.builder
        first = (*builder.encoder.opening, *builder.encode_chunk(example.passages[0]).tokens)[0]
        return () if tokenizer.bos_token_id in (None, first) else (str(tokenizer.bos_token),)

    def _policy(self, name: str) -> str | Policy:
        return self.unregistered.get(name, name)

    def _fit(
        self, example: Example, limit: int, build: Callable[[Sequence[Chunk]], Prompt]
    ) -> tuple[str, ...]:
        """Return the passages, or with ``truncate`` as many from both ends as leave room for an
        answer of ``limit`` tokens. ``build`` makes a prompt of them.

        Raises ContextLengthError if they do not fit.
        """
        chunks = [self.llm.builder.encode_chunk(passage) for passage in example.passages]
        prompt = build(chunks)
        excess = len(prompt) + limit - self.llm.max_model_len
        kept = list(range(len(chunks)))
        while self.truncate and not example.whole and excess > 0 and len(kept) > 1:
            excess -= len(chunks[kept.pop(len(kept) // 2)])
        if excess > 0:
            answer = f" and {limit} for the answer" if limit else ""
            hint = (
                ""
                if self.truncate or example.whole
                else " (--truncate takes passages from the middle)"
            )
            raise ContextLengthError(
                f"over the window: {len(prompt)} prompt tokens{answer}, but the model takes "
                f"{self.llm.max_model_len}{hint}"
            )
        return tuple(example.passages[index] for index in kept)


def _recode(llm: LLM, caches: Iterable[ContextCache], codec: Codec) -> None:
    """Replace the stored KV of these context caches by what a tier with ``codec`` would give back.

    Doing it again changes next to nothing.
    """
    for key in {cache.chunk_key for cache in caches}:
        kv = llm.store.get_computed(key)
        if kv is not None:
            data = bytearray().join(encode_chunk(key, kv, codec).pieces())
            llm.store.delete(key)
            llm.store.put(key, decode_chunk(BufferSource(np.frombuffer(data, dtype=np.uint8)), key))


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The outcome of a prompt under one policy."""

    usage: Usage
    next_tokens: Sequence[NextToken]
    """The distributions that are compared with those of full: of an answer's first token, or of all
    tokens of a continuation."""
    text: str = ""
    """The likeliest answer to a question."""
    along: Sequence[tuple[int, NextToken]] = ()
    """The tokens of full's answer to a question, each with its distribution behind those before
    it."""
    loss: float = 0.0
    """The mean loss of a continuation, in nats per token."""

    def compare(self, full: PolicyRun, example: Example, policy: str) -> Result:
        """Return the result of the ``policy`` on the example that was run, compared with that of
        ``full``."""
        pairs = list(zip(full.next_tokens, self.next_tokens, strict=True))
        measured: dict[str, Any] = {
            "example": example.digest,
            "policy": policy,
            "cached_tokens": self.usage.cached_tokens,
            "recomputed_tokens": self.usage.recomputed_tokens,
            "agreement": fmean(agree(*pair) for pair in pairs),
            "kl": fmean(kl_divergence(*pair) for pair in pairs),
        }
        if isinstance(example, Question):
            along = [
                (expected, found)
                for (_, expected), (_, found) in zip(full.along, self.along, strict=False)
            ] or pairs
            measured["answer_agreement"] = fmean(agree(*pair) for pair in along)
            measured["answer_kl"] = fmean(kl_divergence(*pair) for pair in along)
            return ExampleAnswer(**measured, text=self.text)
        return Scored(**measured, loss=self.loss)


@dataclass(frozen=True, slots=True)
class QuestionTrial:
    """Asks a question in a prompt of context caches, under one policy after the other. It is
    answered greedily, so that equal prompts get equal answers."""

    llm: LLM
    messages: Sequence[Message] | Prompt
    max_tokens: int
    first_line: bool
    grammar: AnswerGrammar | None = None
    """The grammar of the answer; None if it is free."""

    @classmethod
    def of(
        cls,
        question: Question,
        llm: LLM,
        messages: Sequence[Message] | Prompt,
        *,
        max_tokens: int | None = None,
    ) -> Self:
        """Make the trial of a question in these messages, with ``max_tokens`` in place of its own
        limit."""
        limit = question.max_tokens if max_tokens is None else max_tokens
        grammar = AnswerGrammar.choice(question.choices) if question.choices else None
        return cls(llm, messages, limit, question.first_line, grammar)

    def run(self, policy: str | Policy, full: PolicyRun | None = None) -> PolicyRun:
        """Run the prompt under a policy, and then along the answer of ``full``: None for the policy
        that computes everything."""
        answer = forced = self._answer(policy, self.max_tokens, grammar=self.grammar)
        tokens = [] if full is None else [token for token, _ in full.along]
        if tokens and tokens != [entry.token_id for entry in answer.logprobs]:
            forced = self._answer(policy, len(tokens), grammar=AnswerGrammar.tokens(tokens))
        text = answer.text.strip()
        if self.first_line:
            text = text.split("\n", 1)[0].strip()
        return PolicyRun(
            answer.usage,
            (NextToken.of(answer.logprobs[0].top),),
            text=text,
            along=[(entry.token_id, NextToken.of(entry.top)) for entry in forced.logprobs],
        )

    def _answer(self, policy: str | Policy, max_tokens: int, **sampling: Any) -> Answer:
        answer: Answer = self.llm.chat_completion(
            self.messages,
            policy=policy,
            max_tokens=max_tokens,
            temperature=0,
            logprobs=MOST_LOGPROBS,
            **sampling,
        )
        return answer


@dataclass(frozen=True, slots=True)
class ContinuationTrial:
    """Scores the given tokens of a continuation, under one policy after the other. There is no chat
    template: prose goes on."""

    llm: LLM
    parts: Sequence[ContentPart]

    def run(self, policy: str | Policy, _full: PolicyRun | None = None) -> PolicyRun:
        """Run the prompt under a policy."""
        scored = self.llm.score(self.parts, policy=policy, logprobs=MOST_LOGPROBS)
        rows = zip(scored.top_ids, scored.top_logprobs.astype(np.float64), strict=True)
        next_tokens = [NextToken(ids, logprobs) for ids, logprobs in rows]
        return PolicyRun(scored.usage, next_tokens, loss=scored.loss)
