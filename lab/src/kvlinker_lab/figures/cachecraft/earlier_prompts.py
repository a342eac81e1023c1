"""Uses chunk caches as a server has them that has answered other questions before: computed behind
other chunks.

With them come policies for the parts of Cache-Craft one by one, which no user needs, and the
quality of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.base.types.messages import ChatMessage
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.linking import Evidence, Needs, Policy, highest, percentage, share
from kvlinker.linking.policies.cachecraft import CacheCraft, context_impact
from kvlinker.llm import LLM
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.evaluation.evaluate import evaluate
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import REFERENCE, Question, Skipped
from kvlinker.quality.evaluation.task_scores import ALL_TASKS, task_scores
from kvlinker_lab.figures.lab import Lab

TASK = "the task's own"
"""The metric that each task is usually measured by."""
VERSUS_FULL = ("rouge_l_vs_full", "jaccard_vs_full")
"""The metrics against full's own answers."""


@dataclass(frozen=True)
class EarlierPrompts:
    """Makes chunk caches of prompts that came before.

    Call it with an example and its prompt: every chunk gets the KV that it had in an earlier
    prompt. There were two, as long as this one each: the example's passages and as many of the next
    example's were shuffled and cut in half. So a chunk stood behind a random mixture, half of which
    stands in this prompt at all.
    """

    llm: LLM
    questions: Sequence[Question]

    def __call__(self, example: Question, prompt: Prompt) -> Prompt:
        generator = np.random.default_rng(int(example.digest[:15], 16))
        chunks = list(prompt.chunks)
        foreign = [self.llm.builder.encode_chunk(text) for text in self._next(example).passages][
            : len(chunks)
        ]
        mixed = [*enumerate(chunks), *((None, chunk) for chunk in foreign if chunk not in chunks)]
        order = [mixed[index] for index in generator.permutation(len(mixed))]
        half = -(-len(order) // 2)
        for part in (order[:half], order[half:]):
            known = cache_together(self.llm, [chunk for _, chunk in part], example.question)
            for (index, _), chunk in zip(part, known.chunks, strict=True):
                if index is not None:
                    chunks[index] = chunk
        return prompt.with_chunks(chunks)

    def _next(self, example: Question) -> Question:
        following = [one.digest for one in self.questions].index(example.digest) + 1
        return self.questions[following % len(self.questions)]


def cache_together(llm: LLM, chunks: Sequence[Chunk], question: str) -> Prompt:
    """Return a prompt of these chunks, as variants whose KV is computed there now.

    Raises InvalidRequestError for another engine than the embedded one.
    """
    if not isinstance(llm.engine, EmbeddedEngine):
        raise InvalidRequestError("Variants can only be computed at will with the embedded engine.")
    return llm.engine.cache_prompt(ask(llm, chunks, question), tenant=DEFAULT_TENANT).result()


def ask(llm: LLM, chunks: Sequence[Chunk], question: str) -> Prompt:
    """Return the prompt of a question about chunks, as one user message."""
    return llm.builder.chat([ChatMessage("user", (*chunks, question))])


def scores_of(llm: LLM, chunk: Chunk) -> ChunkScores:
    """Return the scores that were stored with the chunk's KV. Raises InvalidRequestError where
    there are none."""
    kv = llm.store.get(chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant=DEFAULT_TENANT))
    if kv is None or kv.scores is None:
        raise InvalidRequestError(
            "The chunk's scores are not stored: it was not cached, or with chunk_scores off."
        )
    return kv.scores


class ContextOrder(Policy):
    """Recomputes the r percent of every inexact chunk's tokens that looked at earlier chunks most:
    Cache-Craft's order (equation 14) without its CFO."""

    family = "inter"
    needs = Needs(scores=True)

    percent: float = percentage()

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for index, span in enumerate(prompt.spans):
            scores = evidence.scores(index)
            if not span.exact:
                looked = np.zeros(span.length) if scores is None else scores.inter
                selected[span.start : span.end] = highest(looked, share(self.percent, span.length))
        return selected


class UnpositionedContextOrder(ContextOrder):
    """Recomputes the same, with placed keys left at the positions they were computed at."""

    family = "inter-unpositioned"
    positioned = False


class WithoutOverlap(CacheCraft):
    """Recomputes as Cache-Craft does without β: CFO = α·CCI, whatever stands before the chunk
    now."""

    family = "cachecraft-without-beta"

    def _overhead(self, prompt: Prompt, evidence: Evidence, index: int) -> float:
        if prompt.spans[index].exact:
            return 0.0
        return min(1.0, self.alpha * context_impact(self._known(prompt, evidence, index)))


def quality_of_earlier_chunks(
    lab: Lab, what: str, policies: Sequence[str | Policy], *, limit: int
) -> list[Row]:
    """Ask with chunks of earlier prompts, see ``EarlierPrompts``, and make a row per policy, task
    and metric.

    The metrics are ``VERSUS_FULL``, and as ``TASK`` the one that the task is measured by. ``what``
    is shown while it runs.
    """
    names = [REFERENCE, *(str(policy) for policy in policies)]
    with lab.open_reader(limit=limit) as reader:
        examiner = Examiner(
            reader.llm,
            prepare=EarlierPrompts(reader.llm, reader.examples),
            unregistered={str(policy): policy for policy in policies if isinstance(policy, Policy)},
        )
        answered = []
        for done, (example, results) in enumerate(evaluate(examiner, reader.examples, names)):
            lab.progress(what, done + 1, len(reader.examples))
            if not isinstance(results, Skipped):
                answered.append((example, results))
    return [
        {**score.row(), "metric": TASK if score.main else score.metric}
        for score in task_scores(answered, names)
        if score.main or score.metric in VERSUS_FULL
    ]


def overall(rows: Sequence[Row], metric: str) -> dict[str, Row]:
    """Return the rows over all tasks, by policy."""
    tasks = {row["task"] for row in rows}
    task = ALL_TASKS if ALL_TASKS in tasks else next(iter(tasks))
    return {row["policy"]: row for row in rows if (row["task"], row["metric"]) == (task, metric)}
