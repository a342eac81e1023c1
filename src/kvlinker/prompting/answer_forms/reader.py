"""Reads what a model answers in a conversation: tells its reasoning and its calls of tools from its
text."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from kvlinker.base.types.answers import AnswerPiece
from kvlinker.base.types.tools import ToolCall
from kvlinker.prompting.answer_forms import REASONING_FIELDS

ID_LENGTH = 9
"""The length of the ids of calls: Mistral's chat templates take no other."""

_Event = dict[str, Any]


class AnswerReader:
    """Reads one answer as it comes. A call that cannot be parsed, such as one that is not JSON, is
    told as the text that it is, marks included, and so is all that follows."""

    def __init__(self, parser: AnswerParser | None = None) -> None:
        """Without a parser, all of the answer is content."""
        begun = [event["type"] for event in parser.initial_events] if parser else []
        self._parser = None if "unparsed" in begun else parser
        self._regions = begun.count("region_open")
        self._trims = self._regions > 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take the next piece of the answer, and return what it is, as far as that is clear, in
        order."""
        if self._parser is None:
            return [AnswerPiece(content=text)]
        return list(self._pieces(self._parser.feed(text)))

    def finish(self) -> list[AnswerPiece]:
        """Return the rest: no more text comes."""
        return [] if self._parser is None else list(self._pieces(self._parser.finish()))

    def _pieces(self, events: Sequence[_Event]) -> Iterator[AnswerPiece]:
        for event in events:
            kind = "reasoning" if event["field"] in REASONING_FIELDS else event["field"]
            match event["type"]:
                case "region_open":
                    self._regions += 1
                    self._trims = kind == "reasoning" or self._regions > 1
                case "region_chunk" if kind == "reasoning":
                    yield AnswerPiece(reasoning=self._trimmed(event["text"]))
                case "region_chunk" if kind == "content":
                    yield AnswerPiece(content=self._trimmed(event["text"]))
                case "region_close" if kind == "tool_calls":
                    yield AnswerPiece(calls=event["calls"])
                case "unparsed":
                    self._parser = None
                    yield AnswerPiece(content=event["text"])

    def _trimmed(self, text: str) -> str:
        """Drop the space between a mark and the text behind it."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


class AnswerParser(ResponseParser):  # type: ignore[misc]
    """Extends transformers' parser: the event with which calls end has them as ``calls``, and an
    event ``unparsed`` has the ``text`` of a call that is none, from its first mark on.

    Transformers' own raises an error there, and with it loses the marks and what stands before the
    call.
    """

    _given = 0
    """The characters of the buffer that the prompt brought."""

    _call_start = 0
    """Where in the buffer the last call begins."""

    def __init__(
        self, template: Mapping[str, Any], *, prefix: str, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Begin behind the prompt that ends with ``prefix``; ``tools`` say of which types arguments
        are."""
        super().__init__(template, prefix=prefix, tools=list(tools))
        self._given = len(self._buffer)

    def finish(self) -> list[_Event]:
        """Return the last events: no more text comes."""
        events: list[_Event] = []
        self._process(events, eos=True)
        return events

    def _process(self, events: list[_Event], eos: bool) -> None:
        try:
            super()._process(events, eos)
        except (ValueError, KeyError, TypeError):
            text = self._buffer[max(self._call_start, self._given) :]
            events.append({"type": "unparsed", "field": "tool_calls", "text": text})

    def _open_explicit(self, events: list[_Event], field: Any, match: Any) -> None:
        super()._open_explicit(events, field, match)
        self._call_start = match.start()

    def _close_current(self, events: list[_Event]) -> None:
        count = len(events)
        super()._close_current(events)
        if len(events) > count and events[-1]["field"] == "tool_calls":
            closed = events.pop()
            values = closed["value"] if isinstance(closed["value"], list) else [closed["value"]]
            events.append({**closed, "calls": tuple(map(_tool_call, values))})


def _tool_call(value: Mapping[str, Any]) -> ToolCall:
    """Make a call of what the parser found. Raises ValueError, KeyError or TypeError for what is
    none."""
    function = value["function"]
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(f"no call of a function: {value!r}")
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    for text in (name, encoded):
        text.encode()  # halves of surrogate pairs, which escapes can spell, are no text
    return ToolCall(_new_call_id(), name, encoded)


def _new_call_id() -> str:
    """Make an id for a call, of letters and digits."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(ID_LENGTH))
