"""Turns one answer, as it is generated, into a series of blocks: reasoning, text, and calls of
tools; for APIs that describe answers so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvlinker.base.types.answers import AnswerPiece, TokenLogprob
from kvlinker.prompting.answer_forms.reader import Reader


@dataclass
class AnswerBlock:
    """A block of an answer; ``text`` grows while it is open."""

    index: int
    kind: Literal["reasoning", "content", "call"]

    text: str = ""
    """The text; of a call, its arguments as JSON."""

    name: str = ""
    """The name of the function that is called."""

    call_id: str = ""

    is_whole: bool = False
    """True if the model ended the block, by another one after it or the end of a call."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    """The log probabilities of a text's tokens, if the request asked for them."""


class BlockStep(NamedTuple):
    """A block begins, goes on by ``text``, or ends."""

    what: Literal["begin", "go on", "end"]
    block: AnswerBlock
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class BlockReader:
    """Reads one answer by a ``Reader``. One block at a time is open."""

    def __init__(self, reader: Reader, *, tells_reasoning: bool = True) -> None:
        """Without ``tells_reasoning``, reasoning is left out."""
        self._tells_reasoning = tells_reasoning
        self.blocks: list[AnswerBlock] = []
        self.thoughts = ""
        """All of the reasoning, also where it is left out."""

        self._reader = reader
        self._open: AnswerBlock | None = None
        self._unread: list[TokenLogprob] = []

    def feed(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[BlockStep]:
        """Take the next piece of the answer, with the log probabilities of its tokens, and yield
        the changes to the blocks."""
        self._unread += logprobs
        yield from self._steps(self._reader.feed(text))

    def finish(self, *, cut: bool) -> Iterator[BlockStep]:
        """Yield the rest: no more text comes. ``cut``: the answer ended before the model ended
        it."""
        yield from self._steps(self._reader.finish(cut=cut))
        yield from self._end(is_whole=not cut)

    def _steps(self, pieces: Iterable[AnswerPiece]) -> Iterator[BlockStep]:
        for piece in pieces:
            if piece.kind == "reasoning":
                self.thoughts += piece.text
            match piece.kind:
                case "call":
                    call = AnswerBlock(
                        len(self.blocks), "call", name=piece.text, call_id=piece.call_id
                    )
                    yield from self._begin(call)
                case "called":
                    yield from self._end()
                case "arguments":
                    yield from self._go_on(piece.text)
                case "reasoning" if not self._tells_reasoning:
                    pass
                case kind:
                    if self._open is None or self._open.kind != kind:
                        yield from self._begin(AnswerBlock(len(self.blocks), kind))
                    yield from self._go_on(piece.text)

    def _begin(self, block: AnswerBlock) -> Iterator[BlockStep]:
        yield from self._end()
        self._open = block
        self.blocks.append(block)
        yield BlockStep("begin", block)

    def _go_on(self, text: str) -> Iterator[BlockStep]:
        assert self._open is not None, "pieces of a call follow its beginning"
        self._open.text += text
        logprobs = self._logprobs_of(text)
        if self._open.kind != "content":
            logprobs = []
        self._open.logprobs += logprobs
        yield BlockStep("go on", self._open, text, logprobs)

    def _logprobs_of(self, text: str) -> list[TokenLogprob]:
        """Return those of the unread tokens that a text is made of, and drop those before them,
        such as marks."""
        if not self._unread:
            return []
        begin = max(0, "".join(entry.text for entry in self._unread).find(text))
        end, place, found = begin + len(text), 0, []
        while self._unread and place < end:
            entry = self._unread.pop(0)
            place += len(entry.text)
            if place > begin:
                found.append(entry)
        return found

    def _end(self, *, is_whole: bool = True) -> Iterator[BlockStep]:
        if self._open is not None:
            ended, self._open = self._open, None
            ended.is_whole = is_whole
            yield BlockStep("end", ended)
