"""Turns one answer, as it is generated, into a series of blocks: reasoning, text, and calls of
tools; for APIs that describe answers so."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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

    def __init__(
        self,
        reader: Reader,
        bytes_of: Callable[[TokenLogprob], bytes],
        *,
        tells_reasoning: bool = True,
    ) -> None:
        """``bytes_of`` gives a token's bytes. Without ``tells_reasoning``, reasoning is left
        out."""
        self._tells_reasoning = tells_reasoning
        self.blocks: list[AnswerBlock] = []
        self.thoughts = ""
        """All of the reasoning, also where it is left out."""

        self._reader = reader
        self._open: AnswerBlock | None = None
        self._tokens = _TokensOfText(bytes_of)

    def feed(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[BlockStep]:
        """Take the next piece of the answer, with the log probabilities of its tokens, and yield
        the changes to the blocks."""
        self._tokens.add(logprobs)
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
        is_content = self._open.kind == "content"
        logprobs = self._tokens.take(text, certain=is_content)
        if not is_content:
            logprobs = []
        self._open.logprobs += logprobs
        yield BlockStep("go on", self._open, text, logprobs)

    def _end(self, *, is_whole: bool = True) -> Iterator[BlockStep]:
        if self._open is not None:
            ended, self._open = self._open, None
            ended.is_whole = is_whole
            yield BlockStep("end", ended)


class _TokensOfText:
    """Finds the tokens that each piece of an answer's text is made of. Tokens are found by their
    bytes: one that is only a part of a character belongs to the piece that has the character."""

    def __init__(self, bytes_of: Callable[[TokenLogprob], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        """The text of the tokens that no piece has covered yet."""

        self._passed = 0
        """The number of characters before ``_text``."""

        self._unread: deque[tuple[int, int, TokenLogprob]] = deque()
        """Tokens, with the first character that each is a part of, and the end of the last one,
        counted from the answer's beginning."""

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Take the next tokens of the answer."""
        for entry in entries:
            begin = self._passed + len(self._text)
            self._text += self._decoder.decode(self._bytes_of(entry))
            end = max(begin + 1, self._passed + len(self._text))
            self._unread.append((begin, end, entry))

    def take(self, text: str, *, certain: bool) -> list[TokenLogprob]:
        """Return the tokens of the next piece of text, and drop those before it, such as marks. A
        piece that is not ``certain`` to be in the answer as it stands, such as a call's arguments,
        may have none."""
        if not (self._unread or self._text):
            return []
        # the end of an answer that was cut within a character is in the text alone
        place = self._text.find(text.rstrip("\ufffd"))
        if place < 0 and not certain:
            return []
        begin = self._passed + max(0, place)
        end = begin + len(text)
        found = []
        while self._unread and self._unread[0][0] < end:
            _, end_of_token, entry = self._unread.popleft()
            if end_of_token > begin:
                found.append(entry)
        self._text, self._passed = self._text[end - self._passed :], end
        return found
