"""Lets the engine compute chunks, and stores them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvlinker.base.errors import ContextLengthError
from kvlinker.base.futures import completed
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.sensitivity import UNRELATED_TEXT, with_sensitivity
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.capture import CaptureRequest, Reading
from kvlinker.engines.embedded.requests.request import ResultKind
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.prompting.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV

Combine = Callable[[Sequence[tuple[ChunkKV, ...]]], tuple[ChunkKV, ...]]
"""Makes the KV of chunks of what several readings captured."""


class PendingChunks(NamedTuple):
    """Chunks that are being computed."""

    kvs: Future[tuple[ChunkKV, ...]]
    """Their resident KV, once it is computed and stored."""

    begun: bool
    """False if another caller had begun it already, and both wait for the same computation, or if
    it was computed and stored meanwhile."""


class ChunkBuilder:
    """Lets the engine compute chunks, and stores them. Methods may be called from any thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: ChunkStore,
        scheduler: Scheduler,
        *,
        longest: int,
        with_scores: bool,
    ) -> None:
        """``longest`` is the most tokens that a chunk and its generation context may have together.
        Without ``with_scores``, attention scores are never collected, even if a chunk is to have
        them."""
        self._loaded = loaded
        self._store = store
        self._scheduler = scheduler
        self._longest = longest
        self.collects_scores = with_scores
        """True if chunks get attention scores where they are asked for."""

        unrelated = loaded.tokenizer.encode(UNRELATED_TEXT, add_special_tokens=False)
        self._unrelated: tuple[int, ...] = (
            tuple(unrelated) if max(unrelated) < loaded.vocabulary else ()
        )
        self._entering = threading.Lock()

    def build(
        self,
        key: str,
        chunk: Chunk,
        *,
        tenant: str,
        urgent: bool = False,
        idle: bool = False,
        with_scores: bool = True,
    ) -> PendingChunks:
        """Compute the chunk in the engine, and store it under ``key``.

        ``urgent`` says that an answer to ``tenant`` waits for it, ``idle`` that everything else
        comes first. Without ``with_scores``, which take more than half of the time, none are
        collected; and without ``chunk.scored``, no sensitivity is measured.

        Raises ContextLengthError and EngineClosedError.
        """
        with_scores = with_scores and self.collects_scores
        scored = [chunk.content] if with_scores else None
        readings = [_behind(chunk.prefix, chunk, scored)]
        combine = _only
        if with_scores and chunk.scored and self._unrelated:
            behind = _behind((*chunk.prefix, *self._unrelated), chunk, None)
            if len(behind.tokens) <= self._longest:
                readings.insert(0, replace(behind, keeps_states=False))
                combine = _with_sensitivity
        return self._build((key,), readings, combine, tenant=tenant, urgent=urgent, idle=idle)

    def build_prompt(
        self, keys: Sequence[str], prompt: Prompt, *, tenant: str
    ) -> Future[tuple[ChunkKV, ...]]:
        """Return the KV of all chunks at their positions in ``prompt``, one key each, once it is
        computed and stored. Their scores measure how much attention the chunks pay to one another.

        Raises ContextLengthError and EngineClosedError.
        """
        spans = [(span.start, span.end) for span in prompt.spans]
        scored = prompt.contents if self.collects_scores else None
        reading = Reading(prompt.tokens[: spans[-1][1]], spans, scored)
        return self._build(tuple(keys), [reading], _only, tenant=tenant).kvs

    def _build(
        self,
        keys: tuple[str, ...],
        readings: Sequence[Reading],
        combine: Combine,
        *,
        tenant: str,
        urgent: bool = False,
        idle: bool = False,
    ) -> PendingChunks:
        longest = len(readings[0].tokens)
        if longest > self._longest:
            raise ContextLengthError(
                f"A chunk has {longest} tokens with its context, but the model takes"
                f" {self._longest}."
            )
        with_scores = readings[-1].scored is not None
        wanted = CaptureRequest(
            self._loaded,
            readings,
            kind=ResultKind.BACKGROUND if idle else ResultKind.CHUNK,
            keep=lambda captured: self._keep(keys, combine(captured)),
            # whoever needs a chunk meanwhile does not wait for an idle engine
            identity=(keys, with_scores, len(readings), idle),
            tenant=tenant,
            urgent=urgent,
        )
        with self._entering:
            if wanted.identity is not None and not self._scheduler.has_unfinished(wanted.identity):
                kvs = self._stored(keys, with_scores)
                if kvs is not None:
                    return PendingChunks(completed(kvs), begun=False)
            entered = self._scheduler.enter(wanted)
        return PendingChunks(entered.future, begun=entered is wanted)

    def _keep(self, keys: Sequence[str], kvs: Sequence[ChunkKV]) -> tuple[ChunkKV, ...]:
        return tuple(self._store.put(key, kv) for key, kv in zip(keys, kvs, strict=True))

    def _stored(self, keys: tuple[str, ...], with_scores: bool) -> tuple[ChunkKV, ...] | None:
        """Return the KV of all chunks, if they were computed since the caller found none, with
        scores where they are wanted.

        A computation is stored before it ends. So a caller misses nothing if it first finds that
        none is unfinished, and then looks here, while no other can begin one.
        """
        kvs = [self._store.get_resident(key) for key in keys]
        found = tuple(
            kv for kv in kvs if kv is not None and (kv.scores is not None or not with_scores)
        )
        return found if len(found) == len(keys) else None


def _behind(before: Sequence[int], chunk: Chunk, scored: Sequence[str] | None) -> Reading:
    tokens = np.array([*before, *chunk.tokens], dtype=np.int64)
    return Reading(tokens, [(len(before), len(tokens))], scored)


def _only(captured: Sequence[tuple[ChunkKV, ...]]) -> tuple[ChunkKV, ...]:
    (kvs,) = captured
    return kvs


def _with_sensitivity(captured: Sequence[tuple[ChunkKV, ...]]) -> tuple[ChunkKV, ...]:
    (behind,), (alone,) = captured
    return (with_sensitivity(alone, behind),)
