"""Turns one answer, as it comes, into a series of blocks: reasoning, text, and calls of tools; for
APIs that tell answers so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvlinker.base.types.answers import AnswerPiece
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
    """True if the model ended the block, by another one behind it or the end of a call."""


class BlockStep(NamedTuple):
    """A block begins, goes on by ``text``, or ends."""

    what: Literal["begin", "go on", "end"]
    block: AnswerBlock
    text: str = ""


class BlockReader:
    """Reads one answer by a ``Reader``. One block at a time is open."""

    def __init__(self, reader: Reader) -> None:
        self.blocks: list[AnswerBlock] = []
        self._reader = reader
        self._open: AnswerBlock | None = None

    def feed(self, text: str) -> Iterator[BlockStep]:
        """Take the next piece of the answer, and yield what it does to the blocks."""
        yield from self._steps(self._reader.feed(text))

    def finish(self, *, cut: bool) -> Iterator[BlockStep]:
        """Yield the rest: no more text comes. ``cut``: the answer ended before the model ended
        it."""
        yield from self._steps(self._reader.finish(cut=cut))
        yield from self._end(is_whole=not cut)

    def _steps(self, pieces: Iterable[AnswerPiece]) -> Iterator[BlockStep]:
        for piece in pieces:
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
        yield BlockStep("go on", self._open, text)

    def _end(self, *, is_whole: bool = True) -> Iterator[BlockStep]:
        if self._open is not None:
            ended, self._open = self._open, None
            ended.is_whole = is_whole
            yield BlockStep("end", ended)
