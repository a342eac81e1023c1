"""Prompts as engines and policies see them: cached chunks and fresh tokens, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunks import Chunk, Origin
from kvlinker.prompting.texts import PromptText


@dataclass(frozen=True, slots=True)
class FreshSegment:
    """Holds tokens that have no chunk cache and are always computed."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CachedSegment:
    """Holds a chunk whose KV the store has, or can have computed again."""

    chunk: Chunk

    @property
    def tokens(self) -> tuple[int, ...]:
        """The chunk's token ids."""
        return self.chunk.tokens


Segment = FreshSegment | CachedSegment


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The place of a cached chunk in a prompt: positions [start, start + length)."""

    start: int
    length: int

    exact: bool
    """True if the tokens before it in the prompt are those that its KV was computed after, so that
    the KV needs no repair."""

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class StoredKV:
    """The place of a part of a reused beginning on disk: tokens [first, last) of the KV under this
    key."""

    key: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, eq=False)
class ReusedPrefix:
    """Describes the beginning of a prompt whose KV an earlier request left, as it was linked
    then."""

    length: int
    """The tokens in it: positions [0, length)."""

    own: NDArray[np.int64]
    """The positions, ascending, whose KV that request computed; all others are chunks'."""

    linked: Mapping[int, str] = field(default_factory=dict)
    """By position, how the chunk that begins there was linked."""

    stored: tuple[StoredKV, ...] = ()
    """The KV of the last of ``own``, in order, that has to be loaded from disk; that of all others
    is in memory."""


@dataclass(frozen=True)
class Prompt:
    """Holds an immutable list of segments; positions count tokens from 0 over all of them."""

    segments: tuple[Segment, ...]

    reused: ReusedPrefix | None = field(default=None, compare=False, repr=False)
    """The beginning that is there already, chunks and fresh tokens; no policy changes it."""

    texts: tuple[PromptText, ...] = field(default=(), compare=False, repr=False)
    """The texts that its fresh tokens were encoded from, where the reader asked for them."""

    @property
    def reused_tokens(self) -> int:
        """The number of tokens in ``reused``."""
        return 0 if self.reused is None else self.reused.length

    @property
    def reused_own(self) -> NDArray[np.int64]:
        """The positions in ``reused``, ascending, whose KV an earlier request computed; the others
        are chunks'."""
        return np.empty(0, dtype=np.int64) if self.reused is None else self.reused.own

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """All token ids in order, [length]."""
        parts = [np.asarray(segment.tokens, dtype=np.int64) for segment in self.segments]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The cached chunks in prompt order (a chunk that stands twice is listed twice)."""
        return tuple(s.chunk for s in self.segments if isinstance(s, CachedSegment))

    @cached_property
    def spans(self) -> tuple[ChunkSpan, ...]:
        """The positions of the ``chunks``, one span each, in the same order."""
        starts = accumulate((len(s.tokens) for s in self.segments), initial=0)
        return tuple(
            ChunkSpan(start, len(segment.chunk), self._is_exact(segment.chunk, start))
            for segment, start in zip(self.segments, starts, strict=False)
            if isinstance(segment, CachedSegment)
        )

    @cached_property
    def contents(self) -> tuple[str, ...]:
        """``chunk.content`` of every chunk, in order."""
        return tuple(chunk.content for chunk in self.chunks)

    def tokens_before(self, chunk: int) -> list[int]:
        """Return all token ids before ``chunks[chunk]``."""
        before: list[int] = self.tokens[: self.spans[chunk].start].tolist()
        return before

    def variant(self, chunk: int) -> Chunk:
        """Return ``chunks[chunk]`` as the variant that is computed after all that stands before it
        here."""
        own = self.chunks[chunk]
        return Chunk(own.tokens, tuple(self.tokens_before(chunk)), salt=own.salt)

    def with_tokens_of(self, chunks: Collection[Chunk]) -> Prompt:
        """Return the prompt with the tokens of these chunks in their places, to be computed."""
        segments = (
            FreshSegment(segment.chunk.tokens)
            if isinstance(segment, CachedSegment) and segment.chunk in chunks
            else segment
            for segment in self.segments
        )
        return replace(self, segments=tuple(segments)) if chunks else self

    def with_chunks_at(self, chunks: Mapping[int, Chunk]) -> Prompt:
        """Return the prompt with chunks in the places of fresh tokens, by the position where each
        begins; all token ids stay. Raises ValueError for a chunk of other ids than stand there."""
        segments: list[Segment] = []
        start = 0
        for segment in self.segments:
            end = start + len(segment.tokens)
            if isinstance(segment, CachedSegment):
                segments.append(segment)
            else:
                done = 0
                for place in sorted(place for place in chunks if start <= place < end):
                    chunk, at = chunks[place], place - start
                    if at < done or segment.tokens[at : at + len(chunk)] != chunk.tokens:
                        raise ValueError(f"the chunk at position {place} has other tokens")
                    segments += [FreshSegment(segment.tokens[done:at]), CachedSegment(chunk)]
                    done = at + len(chunk)
                segments.append(FreshSegment(segment.tokens[done:]))
            start = end
        return Prompt(tuple(segment for segment in segments if segment.tokens))

    def with_chunks(self, chunks: Iterable[Chunk]) -> Prompt:
        """Return the prompt with other chunks in the places of its own, in order."""
        following = iter(chunks)
        return Prompt(
            tuple(
                CachedSegment(next(following)) if isinstance(s, CachedSegment) else s
                for s in self.segments
            )
        )

    @cached_property
    def cached(self) -> NDArray[np.bool_]:
        """A mask that is true where KV is there already, of a chunk or a reused beginning:
        [length]."""
        mask = self._mask(self.spans)
        mask[: self.reused_tokens] = True
        return mask

    @cached_property
    def inexact(self) -> NDArray[np.bool_]:
        """A mask that is true for tokens of chunks whose KV is not exact there, after the reused
        beginning: [length]."""
        return self._mask([span for span in self.spans if not span.exact]) & self.changeable

    @cached_property
    def changeable(self) -> NDArray[np.bool_]:
        """A mask that is false where KV is reused as it is: [length]."""
        return np.arange(len(self)) >= self.reused_tokens

    def _mask(self, spans: Iterable[ChunkSpan]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self), dtype=np.bool_)
        for span in spans:
            mask[span.start : span.end] = True
        return mask

    def _is_exact(self, chunk: Chunk, start: int) -> bool:
        return (
            len(chunk.prefix) == start
            and chunk.place == 0
            and chunk.origin is not Origin.LINKED_ANSWER
            and self.tokens[:start].tolist() == list(chunk.prefix)
        )
