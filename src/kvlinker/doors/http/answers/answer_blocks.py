"""Turns one answer, as it comes, into a series of blocks: reasoning, text, and calls of tools; for
APIs that tell answers so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvlinker.base.types.answers import AnswerPiece
from kvlinker.base.types.tools import ToolCall
from kvlinker.prompting.answer_forms.reader import AnswerReader


@dataclass
class AnswerBlock:
    """A block of an answer; ``text`` grows while it is open."""

    index: int
    kind: Literal["reasoning", "text", "call"]

    text: str = ""
    """The text; of a call, its arguments as JSON."""

    call: ToolCall | None = None
    """The call that the block is; None for the other kinds."""


class BlockStep(NamedTuple):
    """A block begins, goes on by ``text``, or ends."""

    what: Literal["begin", "go on", "end"]
    block: AnswerBlock
    text: str = ""


class BlockReader:
    """Reads one answer by an ``AnswerReader``. One block at a time is open; a call is told
    whole."""

    def __init__(self, reader: AnswerReader) -> None:
        self.blocks: list[AnswerBlock] = []
        self._reader = reader
        self._open: AnswerBlock | None = None

    def feed(self, text: str) -> Iterator[BlockStep]:
        """Take the next piece of the answer, and yield what it does to the blocks."""
        yield from self._steps(self._reader.feed(text))

    def finish(self) -> Iterator[BlockStep]:
        """Yield the rest: no more text comes."""
        yield from self._steps(self._reader.finish())
        yield from self._end()

    def _steps(self, pieces: Iterable[AnswerPiece]) -> Iterator[BlockStep]:
        for piece in pieces:
            if piece.reasoning:
                yield from self._go_on("reasoning", piece.reasoning)
            if piece.content:
                yield from self._go_on("text", piece.content)
            for call in piece.calls:
                yield from self._end()
                yield from self._begin("call", call)
                yield from self._go_on("call", call.arguments)
                yield from self._end()

    def _go_on(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[BlockStep]:
        if self._open is None or self._open.kind != kind:
            yield from self._end()
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield BlockStep("go on", self._open, text)

    def _begin(
        self, kind: Literal["reasoning", "text", "call"], call: ToolCall | None = None
    ) -> Iterator[BlockStep]:
        self._open = AnswerBlock(len(self.blocks), kind, call=call)
        self.blocks.append(self._open)
        yield BlockStep("begin", self._open)

    def _end(self) -> Iterator[BlockStep]:
        if self._open is not None:
            ended, self._open = self._open, None
            yield BlockStep("end", ended)
