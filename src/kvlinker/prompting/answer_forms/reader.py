"""Reads a model's answer in a conversation as it is generated, and separates its reasoning and its
calls of tools from its text, each as soon as it is clear.

Answers are read the same way whole and in pieces. Calls are those that the grammars of
``kvlinker.prompting.answer_forms.form`` allow: anything else is text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from kvlinker.base.types.answers import AnswerPiece
from kvlinker.base.types.call_marks import overlap
from kvlinker.prompting.answer_forms.calls import CallForm

ID_LENGTH = 9
"""The length of the ids of calls: Mistral's chat templates take no other."""

LONGEST_HEAD = 400
"""The most characters of text that is held back since it may be the beginning of a bare call."""

_Heads = Sequence[tuple[str, str]]
"""Beginnings of calls, each with the name of its function."""


class Reader(Protocol):
    """Reads one answer."""

    @property
    def is_over(self) -> bool:
        """True once the answer has as many calls as it may, or has repeated one, which is left out:
        it is to end there."""
        ...

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take the next piece of the answer, and return its parts, as far as they are clear, in
        order."""
        ...

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the rest: no more text comes. ``cut``: the answer ended before the model ended
        it."""
        ...


class PlainReader:
    """A ``Reader`` of answers that are content and nothing else."""

    is_over = False

    def feed(self, text: str) -> list[AnswerPiece]:
        return [AnswerPiece("content", text)] if text else []

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        return []


class AnswerReader:
    """A ``Reader`` of answers of a known form.

    It is at one part of the answer at a time, a method that reads on there, and returns whether
    another part begins; if not, more text is needed. Space around marks is left out, and so is a
    mark that the answer's cut leaves incomplete.
    """

    def __init__(
        self,
        reasoning: tuple[str, str] | None,
        calls: CallForm,
        tools: Sequence[str],
        *,
        begun: str = "",
        only_calls: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """``reasoning`` are the texts around it, None if there is none. ``tools`` are the names of
        functions that may be called. ``begun`` is the part of the answer that the prompt already
        has. ``only_calls``: apart from reasoning there is no text. ``most_calls``: the calls after
        which the answer is over."""
        self._thought_opening, self._thought_closing = reasoning or ("", "")
        self._calls = calls
        self._trigger = calls.trigger if tools else None
        self._first = [(calls.told_by(calls.first_head(name)), name) for name in tools]
        self._next = [
            (calls.told_by(calls.next_head(name)), name)
            for name in (tools if calls.between is not None else ())
        ]
        bare = () if only_calls else tools
        self._bare = [(head, name) for name in bare for head in calls.bare_heads(name)]
        self._only_calls = only_calls
        self._most_calls = most_calls
        self._pieces: list[AnswerPiece] = []
        self._pending = ""
        self._trims = False
        self._begins_line = True
        self._bare_tail = ""
        self._json = _JsonObject()
        self._head_piece = AnswerPiece("call")
        self._held: str | None = None  # arguments that are those of an earlier call so far
        self._called: list[tuple[str, str]] = []  # by name, arguments without space
        self._part: Callable[[], bool] = self._begin_text if reasoning is None else self._lead
        self.feed(begun)
        self._pending = ""
        if self._part not in (self._lead, self._think, self._begin_text):
            self._part = self._text

    @property
    def may_reason(self) -> bool:
        """True if reasoning may come yet, but has not begun."""
        return self._part == self._lead

    @property
    def reasons(self) -> bool:
        """True within reasoning."""
        return self._part == self._think

    @property
    def is_over(self) -> bool:
        return self._part == self._end

    def feed(self, text: str) -> list[AnswerPiece]:
        self._pending += text
        while self._part():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        rest, self._pending = self._pending, ""
        if self._part == self._arguments:
            self._release_call()
        if self._part not in (self._lead, self._think, self._begin_text, self._text):
            rest = ""  # the middle of a call
        elif cut and not (self._part == self._text and self._may_become_bare(rest.lstrip())):
            # what is left but space may be the beginning of a mark
            rest = rest[: len(rest) - len(rest.lstrip())]
        self._tell("reasoning" if self.reasons else "content", rest)
        return self.feed("")

    def _lead(self) -> bool:
        text = self._pending.lstrip()
        if text.startswith(self._thought_opening):
            return self._go_on(self._think, text.removeprefix(self._thought_opening), trims=True)
        return not self._thought_opening.startswith(text) and self._go_on(
            self._begin_text, self._pending
        )

    def _think(self) -> bool:
        self._trim()
        thought, mark, behind = self._pending.partition(self._thought_closing)
        if not mark:
            return self._wait_for(self._thought_closing, "reasoning")
        self._tell("reasoning", thought.rstrip())
        return self._go_on(self._begin_text, behind, trims=True)

    def _begin_text(self) -> bool:
        """Read the beginning of the text, where calls without a trigger are."""
        if self._trigger is None:
            text = self._pending.lstrip()
            if self._begins_call(self._first, text):
                return True
            if _may_become(self._first, text):
                return False
        return self._go_on(self._text, self._pending, trims=self._trims)

    def _text(self) -> bool:
        self._trim()
        if self._trigger is None and not self._bare:
            self._tell("content", self._pending)
            self._pending = ""
            return False
        bare = self._bare_place()
        mark = self._pending.find(self._trigger) if self._trigger else -1
        if 0 <= mark < bare:
            text = self._pending[:mark].rstrip()
            self._tell("content", text)
            return self._go_on(self._head, self._pending[len(text) :])
        if bare == len(self._pending):
            return self._wait_for(self._trigger or "", "content")
        text = self._pending[:bare].rstrip()
        self._tell("content", text)
        behind = self._pending[bare:]
        self._pending = self._pending[len(text) :]
        return self._begins_bare_call(behind)

    def _bare_place(self) -> int:
        """Return where in the pending text a bare call begins, or may begin; else its length."""
        for line in re.finditer(r"(?m)^[ \t]*(?=[`{])", self._pending if self._bare else ""):
            if line.start() or self._begins_line:
                text = self._pending[line.end() : line.end() + LONGEST_HEAD + 1]
                if self._may_become_bare(text) or _bare_head(self._bare, text):
                    return line.end()
        return len(self._pending)

    def _may_become_bare(self, text: str) -> bool:
        """Return whether ``text``, from the beginning of a line on, is that of a bare call."""
        if not text or len(text) > LONGEST_HEAD:
            return False
        return _may_become(self._bare, "".join(text.split()))

    def _begins_bare_call(self, text: str) -> bool:
        """Begin the bare call that ``text`` begins with, if its head is there."""
        found = _bare_head(self._bare, text)
        if found is None:
            return False
        head, name, end = found
        self._bare_tail = "}```" if head.startswith("`") else "}"
        return self._begin_call(name, text[end - 1 :])

    def _head(self) -> bool:
        """Read a call from the space before its trigger to its name."""
        text = self._pending.lstrip()
        if self._begins_call(self._first, text):
            return True
        if _may_become(self._first, text):
            return False
        assert self._trigger is not None, "only a trigger leads here"
        end = self._pending.index(self._trigger) + len(self._trigger)
        self._tell("content", self._pending[:end])
        return self._go_on(self._text, self._pending[end:])

    def _before_arguments(self) -> bool:
        start = self._pending.find("{")
        if start < 0:
            self._pending = ""
            return False
        return self._go_on(self._arguments, self._pending[start:])

    def _arguments(self) -> bool:
        end = self._json.end_in(self._pending)
        text, self._pending = self._pending[:end], self._pending[len(self._pending[:end]) :]
        if self._held is None:
            self._tell("arguments", text)
        else:
            self._held += text
            name, said = self._head_piece.text, self._json.without_space
            if end is not None and (name, said) in self._called:
                return self._go_on(self._end, "")
            if end is not None or not any(
                name == other and known.startswith(said) for other, known in self._called
            ):
                self._release_call()
        if end is None:
            return False
        self._pieces.append(AnswerPiece("called"))
        self._called.append((self._head_piece.text, self._json.without_space))
        if len(self._called) == self._most_calls:
            return self._go_on(self._end, "")
        return self._go_on(self._behind_bare if self._bare_tail else self._behind, self._pending)

    def _release_call(self) -> None:
        """Report the beginning of a call that was held back."""
        if self._held is not None:
            self._pieces.append(self._head_piece)
            self._tell("arguments", self._held)
            self._held = None

    def _end(self) -> bool:
        """Leave out what comes after the last call."""
        self._pending = ""
        return False

    def _behind_bare(self) -> bool:
        """Read the braces and the fence after the arguments of a bare call."""
        end = 0
        for mark in self._bare_tail:
            end += len(self._pending[end:]) - len(self._pending[end:].lstrip())
            if end == len(self._pending):
                return False
            if self._pending[end] != mark:
                break
            end += 1
        self._bare_tail, self._begins_line = "", True
        return self._go_on(self._text, self._pending[end:], trims=True)

    def _behind(self) -> bool:
        """Read the tail of a call."""
        tail = self._calls.tail
        if self._pending != tail and tail.startswith(self._pending):
            return False
        further = self._text if self._calls.calls_begin_alike else self._further
        return self._go_on(further, self._pending.removeprefix(tail), trims=True)

    def _further(self) -> bool:
        """Read the text between two calls, or after the last one."""
        if self._begins_call(self._next, self._pending):
            return True
        closing = self._calls.closing
        if not self._pending.startswith(closing) and (
            closing.startswith(self._pending) or _may_become(self._next, self._pending)
        ):
            return False
        return self._go_on(self._text, self._pending.removeprefix(closing), trims=True)

    def _begins_call(self, heads: _Heads, text: str) -> bool:
        """Begin the call that ``text`` begins with, if it does."""
        found = next((pair for pair in heads if text.startswith(pair[0])), None)
        if found is None:
            return False
        head, name = found
        return self._begin_call(name, text.removeprefix(head))

    def _begin_call(self, name: str, text: str) -> bool:
        """Begin a call of which ``text`` is behind the head."""
        self._head_piece = AnswerPiece("call", name, new_call_id())
        self._json = _JsonObject()
        if any(name == other for other, _ in self._called):
            self._held = ""
        else:
            self._pieces.append(self._head_piece)
        return self._go_on(self._before_arguments, text)

    def _wait_for(self, mark: str, kind: Literal["content", "reasoning"]) -> bool:
        """Report the text, without trailing space and without a possible beginning of ``mark``."""
        text = self._pending[: len(self._pending) - overlap(self._pending, mark)].rstrip()
        self._tell(kind, text)
        self._pending = self._pending[len(text) :]
        return False

    def _go_on(self, part: Callable[[], bool], text: str, *, trims: bool = False) -> bool:
        """Begin the next part with ``text``; return whether that is possible."""
        self._part, self._pending, self._trims = part, text, trims
        return True

    def _trim(self) -> None:
        """Drop the space between a mark and the text after it."""
        if self._trims:
            self._pending = self._pending.lstrip()
            self._trims = not self._pending

    def _tell(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if text and not (kind == "content" and self._only_calls):
            self._pieces.append(AnswerPiece(kind, text))
            self._begins_line = kind != "content"


class _JsonObject:
    """Finds the end of a JSON object, which comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._said: list[str] = []

    @property
    def without_space(self) -> str:
        """The text so far, without space between its parts."""
        return "".join(self._said)

    def end_in(self, text: str) -> int | None:
        """Return where in the next piece the object ends; None if it goes on."""
        for index, character in enumerate(text):
            if self._quoted or not character.isspace():
                self._said.append(character)
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None


def _may_become(heads: _Heads, text: str) -> bool:
    """Return whether ``text`` is the beginning of a head."""
    return any(head.startswith(text) for head, _ in heads)


def _bare_head(heads: _Heads, text: str) -> tuple[str, str, int] | None:
    """Return the head of the bare call that ``text`` begins with, its name, and where it ends in
    the text, which may have space in it; None if there is none."""
    seen = ""
    longest = max((len(head) for head, _ in heads), default=0)
    for end, character in enumerate(text[:LONGEST_HEAD], 1):
        if not character.isspace():
            seen += character
            if character == "{" and len(seen) > 1:
                found = next((pair for pair in heads if pair[0] == seen), None)
                if found is not None:
                    return (*found, end)
        if len(seen) > longest:
            return None
    return None


def new_call_id() -> str:
    """Make an id for a call, of letters and digits."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(ID_LENGTH))
