"""One example put to one model under several policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvlinker.errors import ContextLengthError, EngineClosedError, KVLinkerError
from kvlinker.linking import Policy
from kvlinker.llm import LLM, Message
from kvlinker.prompt.segments import Prompt
from kvlinker.research.evaluation.deviation import Deviation, deviation
from kvlinker.research.evaluation.examples import Continuation, Example, Question, Skipped
from kvlinker.research.evaluation.inspection import Inspector, LayerView
from kvlinker.research.evaluation.next_token import agree, kl_divergence
from kvlinker.research.evaluation.recoding import recode
from kvlinker.research.evaluation.results import Result
from kvlinker.research.evaluation.trials import ContinuationTrial, QuestionTrial, Trial
from kvlinker.store import ContextCache
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.types.chunks import Chunk
from kvlinker.types.messages import ChatMessage

REFERENCE = "full"
"""The policy that all are compared with."""


@dataclass(frozen=True)
class Examiner:
    """Examines one model. Equal examples get equal results. May be called from several threads.

    ``max_tokens`` replaces the questions' own limits. ``truncate``: passages are taken from the middle of contexts over
    the window, as LongBench cuts them; otherwise such examples are skipped. ``inspector``: measure deviations too.
    """

    llm: LLM
    max_tokens: int | None = None
    truncate: bool = False
    inspector: Inspector | None = None
    one_by_one: bool = True
    """Cache chunks one after the other, so that every run computes the same batches, and so the same bits."""
    prepare: Callable[[Question, Prompt], Prompt] | None = None
    """Exchanges the chunks of a question's prompt before it is asked, such as for variants."""
    unregistered: Mapping[str, Policy] = field(default_factory=dict)
    """Policies by names that mean nothing elsewhere."""
    codec: Codec = RAW
    """Chunks are what this codec makes of them."""

    def examine(self, example: Example, policies: Sequence[str]) -> tuple[Result, ...] | Skipped:
        """The policies' results, in their order, or why there are none. Whatever fails is left out for all of them.

        Raises EngineClosedError, after which no example can be asked.
        """
        try:
            return self._results(example, policies)
        except EngineClosedError:
            raise
        except KVLinkerError as error:
            return Skipped(f"{example.dataset} {example.id}", error.message)

    def _results(self, example: Example, policies: Sequence[str]) -> tuple[Result, ...]:
        trial = self._trial(example)
        full = trial.run(REFERENCE)
        full_views = self.inspector.inspect_prompt(trial.prompt(), REFERENCE) if self.inspector is not None else ()
        results = []
        for policy in policies:
            run = full if policy == REFERENCE else trial.run(self._policy(policy))
            compared = list(zip(full.next_tokens, run.next_tokens, strict=True))
            results.append(
                run.result(
                    example=example.digest,
                    policy=policy,
                    cached_tokens=run.usage.cached_tokens,
                    recomputed_tokens=run.usage.recomputed_tokens,
                    agreement=fmean(agree(*pair) for pair in compared),
                    kl=fmean(kl_divergence(*pair) for pair in compared),
                    deviation=self._deviation(trial, policy, full_views),
                )
            )
        return tuple(results)

    def _trial(self, example: Example) -> Trial:
        if isinstance(example, Question):
            return self._question(example)
        return self._continuation(example)

    def _question(self, example: Question) -> QuestionTrial:
        def build(chunks: Sequence[Chunk]) -> Prompt:
            return self.llm.builder.chat([ChatMessage("user", (*chunks, example.question))])

        limit = example.max_tokens if self.max_tokens is None else self.max_tokens
        passages = self._fitting(example, limit, build)
        messages: Sequence[Message] | Prompt = _question(self._cached(passages), example.question)
        if self.prepare is not None:
            messages = self.prepare(example, self.llm.chat_prompt(messages))
        return QuestionTrial(self.llm, messages, limit, example.first_line)

    def _continuation(self, example: Continuation) -> ContinuationTrial:
        def build(chunks: Sequence[Chunk]) -> Prompt:
            parts: list[str | Chunk] = [*self._bos(example), *chunks, example.continuation]
            return self.llm.builder.completion(parts)

        caches = self._cached(self._fitting(example, 0, build))
        return ContinuationTrial(self.llm, (*self._bos(example), *caches, example.continuation))

    def _cached(self, passages: Sequence[str]) -> list[ContextCache]:
        caches = _cached(self.llm, passages, one_by_one=self.one_by_one)
        if self.codec is not RAW:
            recode(self.llm, caches, self.codec)
        return caches

    def _bos(self, example: Continuation) -> tuple[str, ...]:
        """The token that begins texts, unless the tokenizer puts it there by itself or the first chunk has it."""
        tokenizer, builder = self.llm.tokenizer, self.llm.builder
        first = (*builder.encoder.opening, *builder.encode_chunk(example.passages[0]).tokens)[0]
        return () if tokenizer.bos_token_id in (None, first) else (str(tokenizer.bos_token),)

    def _policy(self, name: str) -> str | Policy:
        return self.unregistered.get(name, name)

    def _deviation(self, trial: Trial, policy: str, full: Sequence[LayerView]) -> Deviation | None:
        if self.inspector is None:
            return None
        prompt = trial.prompt()
        views = full if policy == REFERENCE else self.inspector.inspect_prompt(prompt, self._policy(policy))
        return deviation(full, views, prompt.cached)

    def _fitting(self, example: Example, limit: int, build: Callable[[Sequence[Chunk]], Prompt]) -> tuple[str, ...]:
        """The passages, or with ``truncate`` as many from both ends as leave room for an answer of ``limit`` tokens.

        ``build`` makes a prompt of them. Raises ContextLengthError where they do not fit.
        """
        chunks = [self.llm.builder.encode_chunk(passage) for passage in example.passages]
        prompt = build(chunks)
        excess = len(prompt) + limit - self.llm.max_model_len
        kept = list(range(len(chunks)))
        while self.truncate and not example.whole and excess > 0 and len(kept) > 1:
            excess -= len(chunks[kept.pop(len(kept) // 2)])
        if excess > 0:
            answer = f" and {limit} for the answer" if limit else ""
            hint = "" if self.truncate or example.whole else " (--truncate takes passages from the middle)"
            raise ContextLengthError(
                f"over the window: {len(prompt)} prompt tokens{answer}, but the model takes "
                f"{self.llm.max_model_len}{hint}"
            )
        return tuple(example.passages[index] for index in kept)


def ask(llm: LLM, passages: Sequence[str], question: str, *, one_by_one: bool = True) -> list[Message]:
    """One user message: the passages as context caches, which are made now, and the question behind them.

    ``one_by_one``: cache them one after the other, so that every run computes the same batches.
    """
    return _question(_cached(llm, passages, one_by_one=one_by_one), question)


def _question(caches: Sequence[ContextCache], question: str) -> list[Message]:
    return [{"role": "user", "content": [*caches, question]}]


def _cached(llm: LLM, passages: Sequence[str], *, one_by_one: bool) -> list[ContextCache]:
    batches = [[passage] for passage in passages] if one_by_one else [list(passages)]
    return [cache for batch in batches for cache in llm.generate_context_cache(batch)]
