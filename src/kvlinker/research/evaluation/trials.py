"""An example as a prompt of context caches, to be run under one policy after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvlinker.linking import Policy
from kvlinker.llm import LLM, Answer, ContentPart, Message
from kvlinker.prompt.segments import Prompt
from kvlinker.research.evaluation.next_token import NextToken
from kvlinker.research.evaluation.results import Answered, Result, Scored
from kvlinker.types.answers import Usage

MOST_LOGPROBS = 1000
"""Tokens of a distribution that an engine reports."""


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a prompt under one policy.

    ``next_tokens``: the distributions that are compared with those of full. ``result`` takes the other fields of the
    result of this kind of example.
    """

    usage: Usage
    next_tokens: Sequence[NextToken]
    result: Callable[..., Result]


class Trial(Protocol):
    """One example, its passages cached."""

    def prompt(self) -> Prompt: ...

    def run(self, policy: str | Policy) -> Run: ...


@dataclass(frozen=True, slots=True)
class QuestionTrial:
    """``Trial`` of a question, which is answered greedily, so that equal prompts get equal answers."""

    llm: LLM
    messages: Sequence[Message] | Prompt
    max_tokens: int
    first_line: bool

    def prompt(self) -> Prompt:
        return self.llm.chat_prompt(self.messages)

    def run(self, policy: str | Policy) -> Run:
        answer = self._answer(policy, self.max_tokens)
        text = answer.text.strip()
        if self.first_line:
            text = text.split("\n", 1)[0].strip()
        return Run(answer.usage, (self._first_token(policy, answer),), partial(Answered, text=text))

    def _answer(self, policy: str | Policy, max_tokens: int, **sampling: Any) -> Answer:
        return self.llm.chat_completion(
            self.messages, policy=policy, max_tokens=max_tokens, temperature=0, logprobs=MOST_LOGPROBS, **sampling
        )

    def _first_token(self, policy: str | Policy, answer: Answer) -> NextToken:
        """An answer that ends at once reports no distribution: then its first token is asked for again."""
        if not answer.logprobs:
            answer = self._answer(policy, 1, ignore_eos=True)
        return NextToken.of(answer.logprobs[0].top)


@dataclass(frozen=True, slots=True)
class ContinuationTrial:
    """``Trial`` of a continuation, whose tokens are given and scored. No chat template: prose goes on."""

    llm: LLM
    parts: Sequence[ContentPart]

    def prompt(self) -> Prompt:
        return self.llm.completion_prompt(self.parts)

    def run(self, policy: str | Policy) -> Run:
        scored = self.llm.score(self.parts, policy=policy, logprobs=MOST_LOGPROBS)
        rows = zip(scored.top_ids, scored.top_logprobs.astype(np.float64), strict=True)
        next_tokens = [NextToken(ids, logprobs) for ids, logprobs in rows]
        return Run(scored.usage, next_tokens, partial(Scored, loss=scored.loss))
