"""Computing variants of chunks behind the chunks of real prompts, when the engine has nothing else to do."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.chunks import Chunk
from kvlinker.engine.batch import Capture
from kvlinker.engine.loading import LoadedModel
from kvlinker.engine.observation import ScoreCollector
from kvlinker.engine.sequence import Sequence as TokenSequence
from kvlinker.engine.variant_library import VariantLibrary
from kvlinker.prompt.segments import Prompt
from kvlinker.store.chunk_kv import ChunkKV

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
