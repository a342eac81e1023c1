"""One example put to one model under several policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlinker.errors import ContextLengthError, EngineClosedError, KVLinkerError
from kvlinker.evaluation.deviation import Deviation, deviation
from kvlinker.evaluation.examples import Example, Skipped
from kvlinker.evaluation.inspection import Inspector, LayerView
from kvlinker.evaluation.next_token import NextToken, agree, kl_divergence
from kvlinker.linking import Policy
from kvlinker.llm import LLM, Answer, Message
from kvlinker.prompt.chat import ChatMessage
from kvlinker.prompt.segments import Prompt

REFERENCE = "full"
"""The policy that all are compared with."""

MOST_LOGPROBS = 1000
"""Tokens of a distribution that an engine reports."""

_Asked = Sequence[Message] | Prompt


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy made of an example. ``kl`` is in nats, against full; ``agreed``: same most likely first token."""

    example: str
    policy: str
    text: str
    cached_tokens: int
    recomputed_tokens: int
    agreed: bool
    kl: float
    deviation: Deviation | None = None

    @property
    def recomputed_fraction(self) -> float:
        """Tokens computed again over all that chunk caches held."""
        held = self.cached_tokens + self.recomputed_tokens
        return self.recomputed_tokens / held if held else 0.0


@dataclass(frozen=True)
class Examiner:
    """Asks one model. Greedy, so that equal examples get equal answers. May be called from several threads.

    ``max_tokens`` replaces the examples' own limits. ``truncate``: passages are taken from the middle of contexts over
    the window, as LongBench cuts them; otherwise such examples are skipped. ``inspector``: measure deviations too.
    """

    llm: LLM
    max_tokens: int | None = None
    truncate: bool = False
    inspector: Inspector | None = None
    one_by_one: bool = True
    """Cache chunks one after the other, so that every run computes the same batches, and so the same bits."""
    prepare: Callable[[Example, Prompt], Prompt] | None = None
    """Exchanges the chunks of an example's prompt before it is asked, such as for variants."""
    unregistered: Mapping[str, Policy] = field(default_factory=dict)
    """Policies by names that mean nothing elsewhere."""

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
        limit = example.max_tokens if self.max_tokens is None else self.max_tokens
        passages = self._fitting(example, limit)
        messages = self._messages(example, passages)
        full = self._answer(messages, REFERENCE, limit)
        full_next = self._next_token(messages, REFERENCE, full)
        full_views = self.inspector.inspect(messages, REFERENCE) if self.inspector is not None else ()
        results = []
        for policy in policies:
            answer = full if policy == REFERENCE else self._answer(messages, policy, limit)
            next_token = full_next if policy == REFERENCE else self._next_token(messages, policy, answer)
            results.append(
                Result(
                    example=example.digest,
                    policy=policy,
                    text=_first_line(answer.text) if example.first_line else answer.text.strip(),
                    cached_tokens=answer.usage.cached_tokens,
                    recomputed_tokens=answer.usage.recomputed_tokens,
                    agreed=agree(full_next, next_token),
                    kl=kl_divergence(full_next, next_token),
                    deviation=self._deviation(messages, policy, full_views),
                )
            )
        return tuple(results)

    def _answer(self, messages: _Asked, policy: str, limit: int, **sampling: Any) -> Answer:
        chosen = self.unregistered.get(policy, policy)
        return self.llm.chat_completion(
            messages, policy=chosen, max_tokens=limit, temperature=0, logprobs=MOST_LOGPROBS, **sampling
        )

    def _next_token(self, messages: _Asked, policy: str, answer: Answer) -> NextToken:
        """An answer that ends at once reports no distribution: then its first token is asked for again."""
        if not answer.logprobs:
            answer = self._answer(messages, policy, 1, ignore_eos=True)
        return NextToken.of(answer.logprobs[0].top)

    def _deviation(self, messages: _Asked, policy: str, full: Sequence[LayerView]) -> Deviation | None:
        if self.inspector is None:
            return None
        prompt = self.llm.chat_prompt(messages)
        cached = np.zeros(len(prompt), dtype=np.bool_)
        for span in prompt.spans:
            cached[span.start : span.end] = True
        chosen = self.unregistered.get(policy, policy)
        return deviation(full, full if policy == REFERENCE else self.inspector.inspect(messages, chosen), cached)

    def _messages(self, example: Example, passages: Sequence[str]) -> _Asked:
        batches = [[passage] for passage in passages] if self.one_by_one else [list(passages)]
        caches = [cache for batch in batches for cache in self.llm.generate_context_cache(batch)]
        messages = [{"role": "user", "content": [*caches, example.question]}]
        return messages if self.prepare is None else self.prepare(example, self.llm.chat_prompt(messages))

    def _fitting(self, example: Example, limit: int) -> tuple[str, ...]:
        """The passages, or with ``truncate`` as many from both ends as leave room for the answer.

        Raises ContextLengthError where they do not fit.
        """
        builder = self.llm.builder
        chunks = [builder.encode_chunk(passage) for passage in example.passages]
        prompt = builder.chat([ChatMessage("user", (*chunks, example.question))])
        excess = len(prompt) + limit - self.llm.max_model_len
        kept = list(range(len(chunks)))
        while self.truncate and not example.whole and excess > 0 and len(kept) > 1:
            excess -= len(chunks[kept.pop(len(kept) // 2)])
        if excess > 0:
            hint = "" if self.truncate or example.whole else " (--truncate takes passages from the middle)"
            raise ContextLengthError(
                f"over the window: {len(prompt)} prompt tokens and {limit} for the answer, but the model takes "
                f"{self.llm.max_model_len}{hint}"
            )
        return tuple(example.passages[index] for index in kept)


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0].strip()
