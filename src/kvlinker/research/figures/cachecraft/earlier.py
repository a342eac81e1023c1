"""Chunk caches as a server has them that has answered other questions before: computed behind other chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlinker.embedded.engine import EmbeddedEngine
from kvlinker.errors import InvalidRequestError
from kvlinker.llm import LLM
from kvlinker.prompt.segments import Prompt
from kvlinker.research.evaluation.examples import Question
from kvlinker.types.chunk_scores import ChunkScores
from kvlinker.types.chunks import Chunk, chunk_key
from kvlinker.types.messages import ChatMessage
from kvlinker.types.tenants import DEFAULT_TENANT


@dataclass(frozen=True)
class EarlierPrompts:
    """Makes chunk caches of prompts that came before.

    Call it with an example and its prompt: every chunk gets the KV that it had in an earlier prompt. There were two, as
    long as this one each: the example's passages and as many of the next example's were shuffled and cut in half. So a
    chunk stood behind a random mixture, half of which stands in this prompt at all.
    """

    llm: LLM
    questions: Sequence[Question]

    def __call__(self, example: Question, prompt: Prompt) -> Prompt:
        generator = np.random.default_rng(int(example.digest[:15], 16))
        chunks = list(prompt.chunks)
        foreign = [self.llm.builder.encode_chunk(text) for text in self._next(example).passages][: len(chunks)]
        mixed = [*enumerate(chunks), *((None, chunk) for chunk in foreign if chunk not in chunks)]
        order = [mixed[index] for index in generator.permutation(len(mixed))]
        half = -(-len(order) // 2)
        for part in (order[:half], order[half:]):
            known = cached_together(self.llm, [chunk for _, chunk in part], example.question)
            for (index, _), chunk in zip(part, known.chunks, strict=True):
                if index is not None:
                    chunks[index] = chunk
        return prompt.with_chunks(chunks)

    def _next(self, example: Question) -> Question:
        following = [one.digest for one in self.questions].index(example.digest) + 1
        return self.questions[following % len(self.questions)]


def cached_together(llm: LLM, chunks: Sequence[Chunk], question: str) -> Prompt:
    """A prompt of these chunks, as variants whose KV is computed there now.

    Raises InvalidRequestError for another engine than the embedded one.
    """
    if not isinstance(llm.engine, EmbeddedEngine):
        raise InvalidRequestError("Variants can only be computed at will with the embedded engine.")
    return llm.engine.cache_prompt(asked(llm, chunks, question), tenant=DEFAULT_TENANT).result()


def asked(llm: LLM, chunks: Sequence[Chunk], question: str) -> Prompt:
    """A question about chunks, as one user message."""
    return llm.builder.chat([ChatMessage("user", (*chunks, question))])


def scores_of(llm: LLM, chunk: Chunk) -> ChunkScores:
    """What was stored with the chunk's KV when it was computed."""
    kv = llm.store.get(chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant=DEFAULT_TENANT))
    if kv is None or kv.scores is None:
        raise InvalidRequestError("The chunk's scores are not stored: it was not cached, or with chunk_scores off.")
    return kv.scores
