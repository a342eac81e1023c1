"""Prompts as engines and policies see them: cached chunks and fresh tokens in order, and beside
them the texts of the fresh tokens, so that passages can become chunks without any other id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunks import Chunk, Origin

Span = tuple[int, int]
"""Characters [begin, end) of a text."""

Range = tuple[int, int]
"""Positions [begin, end)."""

_NO_POSITIONS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


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
    """The place of a cached chunk in a prompt: positions [start, end)."""

    start: int
    end: int

    exact: bool
    """True if the tokens before it in the prompt are those that its KV was computed after, so that
    the KV needs no repair."""

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return self.end - self.start


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


class TokenPlaces(NamedTuple):
    """The places of a text's tokens: the index of each one's first character, and of the one after
    its last; ascending, [tokens] each. The tokens of one character share both."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class PromptText:
    """A text of a prompt between two chunks, or between one and the prompt's end."""

    text: str

    places: TokenPlaces
    """Where its tokens stand in it."""

    first: int = 0
    """The position of its first token in the prompt."""

    messages: tuple[Span, ...] = ()
    """Where texts of messages, or parts of a completion, stand in it, ascending and apart."""

    definitions: tuple[Span, ...] = ()
    """Where definitions of tools stand in it, ascending and apart."""

    before: str = ""
    """Names the chunks between the text before it and this one."""

    @property
    def sections(self) -> list[Span]:
        """Its messages, its definitions, and what stands between them, in order."""
        quoted = chain.from_iterable((*self.messages, *self.definitions))
        return list(pairwise(sorted({0, len(self.text), *quoted})))

    def tokens_within(self, begin: int, end: int) -> Span:
        """Return the positions [first, last) in the prompt of the tokens that lie within the
        characters [begin, end)."""
        starts, ends = self.places
        first = int(np.searchsorted(starts, begin))
        last = max(first, int(np.searchsorted(starts, end)))
        while last > first and ends[last - 1] > end:
            last -= 1
        return self.first + first, self.first + last


class Passage(NamedTuple):
    """A part of a prompt's text that is, or may become, a chunk: characters [begin, end)."""

    source: PromptText
    begin: int
    end: int

    @property
    def text(self) -> str:
        """Its characters."""
        return self.source.text[self.begin : self.end]

    @property
    def tokens(self) -> Span:
        """The positions [first, last) of its tokens in the prompt."""
        return self.source.tokens_within(self.begin, self.end)


@dataclass(frozen=True)
class Prompt:
    """Holds an immutable list of segments; positions count tokens from 0 over all of them."""

    segments: tuple[Segment, ...]

    reused: ReusedPrefix | None = field(default=None, compare=False, repr=False)
    """The beginning that is there already, chunks and fresh tokens; no policy changes it."""

    texts: tuple[PromptText, ...] = field(default=(), compare=False, repr=False)
    """The texts that its fresh tokens were encoded from, where the reader asked for them."""

    length: int = field(init=False, compare=False, repr=False)
    """The number of its tokens."""

    chunks: tuple[Chunk, ...] = field(init=False, compare=False, repr=False)
    """The cached chunks in prompt order (a chunk that stands twice is listed twice)."""

    reused_tokens: int = field(init=False, compare=False, repr=False)
    """The number of tokens in ``reused``."""

    reused_own: NDArray[np.int64] = field(init=False, compare=False, repr=False)
    """The positions in ``reused``, ascending, whose KV an earlier request computed; the others are
    chunks'."""

    def __post_init__(self) -> None:
        length = 0
        chunks: list[Chunk] = []
        for segment in self.segments:
            if isinstance(segment, CachedSegment):
                chunks.append(segment.chunk)
                length += len(segment.chunk.tokens)
            else:
                length += len(segment.tokens)
        reused = self.reused
        # A frozen dataclass sets its computed fields like this.
        vars(self).update(
            length=length,
            chunks=tuple(chunks),
            reused_tokens=0 if reused is None else reused.length,
            reused_own=_NO_POSITIONS if reused is None else reused.own,
        )

    def __len__(self) -> int:
        return self.length

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """All token ids in order, [length]."""
        ids: list[int] = []
        for segment in self.segments:
            if isinstance(segment, CachedSegment):
                ids += segment.chunk.tokens
            else:
                ids += segment.tokens
        return np.array(ids, dtype=np.int64)

    @cached_property
    def spans(self) -> tuple[ChunkSpan, ...]:
        """The positions of the ``chunks``, one span each, in the same order."""
        spans: list[ChunkSpan] = []
        start = 0
        for segment in self.segments:
            if isinstance(segment, FreshSegment):
                start += len(segment.tokens)
                continue
            chunk = segment.chunk
            end = start + len(chunk.tokens)
            # Tokens are compared last: that takes longest.
            exact = (
                len(chunk.prefix) == start
                and chunk.place == 0
                and chunk.origin is not Origin.LINKED_ANSWER
                and self.tokens[:start].tolist() == list(chunk.prefix)
            )
            spans.append(ChunkSpan(start, end, exact))
            start = end
        return tuple(spans)

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
        if not chunks:
            return self
        segments = (
            FreshSegment(segment.chunk.tokens)
            if isinstance(segment, CachedSegment) and segment.chunk in chunks
            else segment
            for segment in self.segments
        )
        return replace(self, segments=tuple(segments))

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
        segments: list[Segment] = []
        for segment in self.segments:
            if isinstance(segment, CachedSegment):
                segment = CachedSegment(next(following))
            segments.append(segment)
        return Prompt(tuple(segments))

    @cached_property
    def cached(self) -> NDArray[np.bool_]:
        """A mask that is true where KV is there already, of a chunk or a reused beginning:
        [length]."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for span in self.spans:
            mask[span.start : span.end] = True
        mask[: self.reused_tokens] = True
        return mask

    @cached_property
    def inexact_ranges(self) -> tuple[Range, ...]:
        """The positions [begin, end) of each chunk whose KV is not exact there, as far as they are
        after the reused beginning."""
        done = self.reused_tokens
        return tuple(
            (max(span.start, done), span.end)
            for span in self.spans
            if not span.exact and span.end > done
        )

    @cached_property
    def inexact(self) -> NDArray[np.bool_]:
        """A mask that is true at ``inexact_ranges``: [length]."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for begin, end in self.inexact_ranges:
            mask[begin:end] = True
        return mask

    @cached_property
    def changeable(self) -> NDArray[np.bool_]:
        """A mask that is false where KV is reused as it is: [length]."""
        mask = np.ones(self.length, dtype=np.bool_)
        mask[: self.reused_tokens] = False
        return mask


def ranges(mask: NDArray[np.bool_]) -> tuple[Range, ...]:
    """Find the maximal ranges [begin, end) where ``mask`` [length] is true."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
