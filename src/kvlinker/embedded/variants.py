"""Variants of chunks: KV computed behind the chunks of real prompts, when the engine has nothing else to do."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.embedded.batch import Capture
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.embedded.sequence import Sequence as TokenSequence
from kvlinker.engine.observation import ScoreCollector
from kvlinker.linking.evidence import Variant
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.catalog.variants import StoredVariant, VariantIndex, VariantOwner
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.types.chunks import Chunk, chunk_key


class VariantLibrary:
    """The variants of one model, at most ``limit`` over all tenants. All methods may be called from any thread."""

    def __init__(self, index: VariantIndex, store: ChunkStore, *, fingerprint: str, limit: int) -> None:
        self._index = index
        self._store = store
        self._fingerprint = fingerprint
        self._limit = limit

    def of(self, tenant: str) -> TenantVariants:
        """``Library`` of one tenant, for one request."""
        return TenantVariants(self._index, self._store, self._fingerprint, tenant)

    def missing(self, prompt: Prompt, tenant: str) -> list[int]:
        """The chunks of the prompt, by index, of whose KV no exact copy is stored."""
        library = self.of(tenant)
        missing = []
        for index, (chunk, span) in enumerate(zip(prompt.chunks, prompt.spans, strict=True)):
            if not span.exact:
                before = tuple(prompt.tokens_before(index))
                if all(variant.chunk.prefix != before for variant in library.variants(chunk)):
                    missing.append(index)
        return missing if self._limit else []

    def note_use(self, key: str, recomputed: float) -> None:
        """A request took the variant, computing this share of its tokens again."""
        self._index.note_use(key, recomputed)

    def put(self, computed: Sequence[tuple[Chunk, ChunkKV]], tenant: str) -> None:
        """Keep variants with their scores, unless no context cache holds their chunks any more; the least reusable
        ones make room."""
        records = []
        for chunk, kv in computed:
            assert kv.scores is not None, "a variant is computed with scores"
            key = chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant)
            self._store.put(key, kv)
            owner = VariantOwner(self._fingerprint, tenant, chunk.content)
            records.append((owner, StoredVariant(key, chunk.prefix, kv.scores.contextualization)))
        for key in self._index.add(records, limit=self._limit):
            self._store.delete(key)


class TenantVariants:
    """``Library`` over what is stored for one tenant."""

    def __init__(self, index: VariantIndex, store: ChunkStore, fingerprint: str, tenant: str) -> None:
        self._index = index
        self._store = store
        self._fingerprint = fingerprint
        self._tenant = tenant

    def variants(self, chunk: Chunk) -> tuple[Variant, ...]:
        found = []
        for stored in self._index.find(VariantOwner(self._fingerprint, self._tenant, chunk.content)):
            if self._store.tier_of(stored.key) is None:
                self._index.forget(stored.key)
                continue
            found.append(Variant(Chunk(chunk.tokens, stored.prefix), stored.contextualization))
        return tuple(found)


logger = logging.getLogger(__name__)

MOST_WAITING = 4
"""Prompts that wait for an idle engine; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A prompt whose chunks with these indices lack an exact variant."""

    prompt: Prompt
    tenant: str
    chunks: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt.spans[self.chunks[-1]].end


class VariantBuilder:
    """One full prefill of a prompt gives the exact KV, and the scores, of all its chunks.

    ``offer`` may be called from any thread, all else from the engine's.
    """

    def __init__(self, loaded: LoadedModel, library: VariantLibrary, *, longest: int) -> None:
        self._loaded = loaded
        self._library = library
        self._longest = longest
        self._lock = threading.Lock()
        self._waiting: deque[_Wanted] = deque(maxlen=MOST_WAITING)  # guarded by _lock
        self._under_way: dict[TokenSequence, _Wanted] = {}

    @property
    def waiting(self) -> bool:
        """Something could be computed."""
        return bool(self._waiting)

    @property
    def under_way(self) -> tuple[TokenSequence, ...]:
        return tuple(self._under_way)

    def offer(self, prompt: Prompt, tenant: str) -> bool:
        """A request missed variants of this prompt, perhaps: remember to compute them. False if there is nothing."""
        missing = self._library.missing(prompt, tenant)
        if not missing or prompt.spans[missing[-1]].end > self._longest:
            return False
        wanted = _Wanted(prompt, tenant, tuple(missing))
        with self._lock:
            if wanted not in self._waiting:
                self._waiting.append(wanted)
        return True

    def start(self) -> TokenSequence | None:
        """The sequence of the prompt that was missed last."""
        with self._lock:
            if not self._waiting:
                return None
            wanted = self._waiting.pop()
        spans = [(span.start, span.end) for span in wanted.prompt.spans[: wanted.chunks[-1] + 1]]
        scores = ScoreCollector(len(self._loaded.layers), spans, wanted.prompt.contents)
        sequence = TokenSequence(
            wanted.prompt.tokens[: wanted.length],
            [(0, wanted.length)],
            most_tokens=wanted.length,
            capture=Capture(self._loaded.layers, spans, dtype=self._loaded.dtype, scores=scores),
        )
        self._under_way[sequence] = wanted
        return sequence

    def finish(self, sequence: TokenSequence) -> Callable[[], None]:
        """All is computed; what is left is to store it, which takes time and needs another thread."""
        wanted = self._under_way.pop(sequence)
        assert sequence.capture is not None
        kvs = sequence.capture.finish()
        computed = [(wanted.prompt.variant(index), kvs[index]) for index in wanted.chunks]
        return lambda: self._put(computed, wanted.tenant)

    def drop(self, sequence: TokenSequence) -> None:
        """Give it up."""
        self._under_way.pop(sequence, None)

    def _put(self, computed: Sequence[tuple[Chunk, ChunkKV]], tenant: str) -> None:
        try:
            self._library.put(computed, tenant)
        except Exception:
            logger.exception("Variants could not be stored.")
