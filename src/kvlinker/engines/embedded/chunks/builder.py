"""Has chunks computed by the engine, and stored."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import ContextLengthError
from kvlinker.base.futures import resolved
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.sensitivity import UNRELATED_TEXT
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.capture import CaptureRequest
from kvlinker.engines.embedded.requests.request import ResultKind
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.prompting.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV


class PendingChunks(NamedTuple):
    """Chunks that are being computed."""

    kvs: Future[tuple[ChunkKV, ...]]
    """Their resident KV, once it is computed and stored."""

    begun: bool
    """False if another caller had begun it already, and both wait for the same computation, or if
    it was computed and stored meanwhile."""


class ChunkBuilder:
    """Has chunks computed by the engine, and stored. Methods may be called from any thread."""

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
        """Have the chunk computed, and stored under ``key``.

        ``urgent`` says that an answer to ``tenant`` waits for it, ``idle`` that everything else
        comes first. Without ``with_scores``, which take more than half of the time, none are
        collected; and without ``chunk.scored``, no sensitivity is measured.

        Raises ContextLengthError and EngineClosedError.
        """
        tokens = np.array([*chunk.prefix, *chunk.tokens], dtype=np.int64)
        spans = [(len(chunk.prefix), len(tokens))]
        return self._build(
            (key,),
            tokens,
            spans,
            [chunk.content],
            tenant=tenant,
            urgent=urgent,
            idle=idle,
            with_scores=with_scores,
            measures=chunk.scored,
        )

    def build_prompt(
        self, keys: Sequence[str], prompt: Prompt, *, tenant: str
    ) -> Future[tuple[ChunkKV, ...]]:
        """Return the KV of all chunks at their positions in ``prompt``, one key each, once it is
        computed and stored. Their scores measure how much attention the chunks pay to one another.

        Raises ContextLengthError and EngineClosedError.
        """
        spans = [(span.start, span.end) for span in prompt.spans]
        return self._build(
            tuple(keys),
            prompt.tokens[: spans[-1][1]],
            spans,
            prompt.contents,
            tenant=tenant,
        ).kvs

    def _build(
        self,
        keys: tuple[str, ...],
        tokens: NDArray[np.int64],
        spans: Sequence[tuple[int, int]],
        contents: Sequence[str],
        *,
        tenant: str,
        urgent: bool = False,
        idle: bool = False,
        with_scores: bool = True,
        measures: bool = False,
    ) -> PendingChunks:
        if len(tokens) > self._longest:
            raise ContextLengthError(
                f"A chunk has {len(tokens)} tokens with its context, but the model takes"
                f" {self._longest}."
            )
        with_scores = with_scores and self.collects_scores
        fits = len(tokens) + len(self._unrelated) <= self._longest
        unrelated = self._unrelated if with_scores and measures and fits else ()
        wanted = CaptureRequest(
            self._loaded,
            tokens,
            spans,
            contents,
            kind=ResultKind.BACKGROUND if idle else ResultKind.CHUNK,
            keep=partial(self._keep, keys),
            # whoever needs a chunk meanwhile does not wait for an idle engine
            identity=None if idle else (keys, with_scores, bool(unrelated)),
            with_scores=with_scores,
            unrelated=unrelated,
            tenant=tenant,
            urgent=urgent,
        )
        with self._entering:
            if wanted.identity is not None and not self._scheduler.has_unfinished(wanted.identity):
                kvs = self._stored(keys, with_scores)
                if kvs is not None:
                    return PendingChunks(resolved(kvs), begun=False)
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
