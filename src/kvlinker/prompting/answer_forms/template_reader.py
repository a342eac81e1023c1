"""Reads answers by the tokenizer's response template, if the form of calls is not known otherwise;
a call is reported as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from kvlinker.base.types.answers import AnswerPiece
from kvlinker.base.types.tools import Tool
from kvlinker.prompting.answer_forms.reader import new_call_id

_REASONING_FIELDS = ("thinking", "reasoning", "reasoning_content")
"""The names that response templates have for the field of reasoning."""

_Event = dict[str, Any]


class TemplateReader:
    """A ``Reader``. A call that cannot be parsed, such as one that is not JSON, is returned as
    text, marks included, and so is all that follows; one that is cut off is left out."""

    def __init__(
        self,
        template: Mapping[str, Any],
        tools: Sequence[Tool],
        *,
        tail: str,
        most_calls: int | None = None,
    ) -> None:
        """``tools`` have the types of arguments, and ``tail``, the end of the prompt, the part that
        has begun there; without ``tools``, text that looks like a call is text. ``most_calls``: the
        calls after which the answer is over."""
        self.is_over = False
        self._most_calls = most_calls
        self._called: list[tuple[str, str]] = []
        parsed = template if tools else _without_calls(template)
        self._parser: _AnswerParser | None = _AnswerParser(
            parsed, prefix=tail, tools=list(map(dict, tools))
        )
        begun = [event["type"] for event in self._parser.initial_events]
        if "unparsed" in begun:
            self._parser = None
        self._regions = begun.count("region_open")
        self._trims = self._regions > 0

    def feed(self, text: str) -> list[AnswerPiece]:
        if self._parser is None:
            return [AnswerPiece("content", text)] if text else []
        return list(self._pieces(self._parser.feed(text)))

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        if self._parser is None or (cut and self._parser.calls):
            return []
        return list(self._pieces(self._parser.finish()))

    def _pieces(self, events: Sequence[_Event]) -> Iterator[AnswerPiece]:
        for event in events:
            if self.is_over:
                return
            kind = "reasoning" if event["field"] in _REASONING_FIELDS else event["field"]
            match event["type"]:
                case "region_open":
                    self._regions += 1
                    self._trims = kind == "reasoning" or self._regions > 1
                case "region_chunk" if kind in ("reasoning", "content"):
                    if text := self._trimmed(event["text"]):
                        yield AnswerPiece("content" if kind == "content" else "reasoning", text)
                case "region_close" if kind == "tool_calls":
                    for name, arguments in event["calls"]:
                        if (name, arguments) in self._called or self.is_over:
                            self.is_over = True
                            break
                        self._called.append((name, arguments))
                        self.is_over = len(self._called) == self._most_calls
                        yield AnswerPiece("call", name, new_call_id())
                        yield AnswerPiece("arguments", arguments)
                        yield AnswerPiece("called")
                case "unparsed":
                    self._parser = None
                    yield AnswerPiece("content", event["text"])

    def _trimmed(self, text: str) -> str:
        """Drop the space between a mark and the text after it."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


class _AnswerParser(ResponseParser):  # type: ignore[misc]
    """Extends transformers' parser: the event with which calls end has their names and arguments as
    ``calls``, and an event ``unparsed`` has the ``text`` of a call that is none, from its first
    mark on.

    Transformers' own raises an error there, and loses the marks and the text before the call.
    """

    _given = 0
    """The characters of the buffer that the prompt brought."""

    _call_start = 0
    """Where in the buffer the last call begins."""

    def __init__(
        self, template: Mapping[str, Any], *, prefix: str, tools: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__(dict(template), prefix=prefix, tools=list(tools))
        self._given = len(self._buffer)

    @property
    def calls(self) -> bool:
        """True within a call."""
        return bool(self._current == "tool_calls")

    def finish(self) -> list[_Event]:
        """Return the last events: no more text comes."""
        events: list[_Event] = []
        self._process(events, eos=True)
        return events

    def _process(self, events: list[_Event], eos: bool) -> None:
        try:
            super()._process(events, eos)
        except (ValueError, KeyError, TypeError, RecursionError):
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
            events.append({**closed, "calls": tuple(map(_call, values))})


def _call(value: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and arguments of a call that the parser found. Raises ValueError, KeyError or
    TypeError for texts that are not calls."""
    function = value["function"]
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(f"no call of a function: {value!r}")
    encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    for text in (name, encoded):
        text.encode()  # halves of surrogate pairs, which escapes can spell, are no text
    return name, encoded


def _without_calls(template: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
    return {**template, "fields": kept}
