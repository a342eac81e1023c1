"""Reads what a model answers in a conversation: tells its reasoning and its calls of tools from its text.

The parser is transformers', by the response template that the tokenizer brings, or one of ``response_formats``.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlinker.prompt.response_formats import format_for
from kvlinker.types.answers import ResponsePiece
from kvlinker.types.grammars import AnswerGrammar, json_style
from kvlinker.types.tools import Tool, ToolCall, function_of

ID_LENGTH = 9
"""The length of the ids of calls: Mistral's chat templates take no other."""

_REASONING = ("thinking", "reasoning", "reasoning_content")
_ANYTHING = r"/(?s:.*)/"


@dataclass(frozen=True)
class ResponseFormat:
    """Knows how one model writes reasoning and calls. Any thread may use it."""

    tokenizer: Any

    template: Mapping[str, Any]
    """Transformers' response template."""

    reasoning: tuple[str, str] | None
    """The texts around reasoning; None for a model that does not reason, or in a way that is not known."""

    calls: Mapping[str, str | None]
    """The form of calls, as in the files of ``response_formats``."""

    marks: Mapping[str, int]
    """The texts of the format that are tokens of their own, with their ids."""

    shown_tokens: frozenset[int]
    """Those of ``marks`` that are special tokens: they have to be seen in an answer to read it."""

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str | None) -> ResponseFormat:
        """Find the format of a model by its tokenizer and its chat template."""
        way = format_for(chat_template or "")
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        thoughts = way.get("reasoning")
        reasoning = None
        if thoughts is not None and thoughts["when"] in (chat_template or ""):
            reasoning = (thoughts["open"], thoughts["close"])
        own = getattr(tokenizer, "response_template", None)
        template = own or _without(way["response_template"], () if reasoning else _REASONING)
        texts = [*_texts(template["fields"]), *_texts(way["calls"]), *(reasoning or ())]
        marks = {index: token for index, token in added.items() if any(token.content in text for text in texts)}
        return cls(
            tokenizer,
            template,
            reasoning,
            way["calls"],
            {token.content: index for index, token in marks.items()},
            frozenset(index for index, token in marks.items() if token.special),
        )

    def reader(self, tail: str, tools: Sequence[Tool]) -> ResponseReader:
        """Return a reader of one answer. ``tail`` is the end of its prompt, special tokens included; without ``tools``,
        text that looks like a call is text."""
        template = self.template if tools else _without(self.template, ("tool_calls",))
        parser = self.tokenizer.get_response_parser(dict(template), prefix=tail, tools=[dict(tool) for tool in tools])
        return ResponseReader(parser)

    def calls_grammar(self, tools: Sequence[Tool], *, tail: str, several: bool) -> AnswerGrammar:
        """Return the grammar of answers that call one of ``tools``, or ``several`` times some of them."""
        rules = self._calls(tools, several=several)
        return AnswerGrammar("lark", f"start: {self._lead(tail)} calls\n{self._lead_rules()}{rules}", "tools")

    def free_grammar(self, tools: Sequence[Tool], *, tail: str, several: bool) -> AnswerGrammar:
        """Return the grammar of answers of any text, which may end with calls of ``tools``: one, or ``several``."""
        trigger = self.calls.get("trigger")
        rules = self._calls(tools, several=several, begun=trigger or "")
        if trigger is None:
            text, called = "TEXT: /([^{\\s](?s:.*))?/\n", "calls"
        elif trigger in self.marks:
            text, called = f"TEXT: {_ANYTHING}\n", f"TEXT {self._literal(trigger)} calls"
        else:
            text = f"TEXT: {_ANYTHING}\ntriggered[lazy]: TEXT {json.dumps(trigger)}\n"
            called = "triggered calls"
        start = f"start: {self._lead(tail)} (TEXT | {called})\n"
        return AnswerGrammar("lark", start + text + self._lead_rules() + rules, "tools")

    def framed(
        self, grammar: AnswerGrammar, *, tail: str, tools: Sequence[Tool] = (), several: bool = True
    ) -> AnswerGrammar:
        """Return a grammar of answers that may reason before they follow ``grammar``, or call one of ``tools``
        instead."""
        lead = self._lead(tail)
        if not lead and not tools:
            return grammar
        answer = "(calls | @answer)" if tools else "@answer"
        rules = self._calls(tools, several=several) if tools else ""
        frame = f"start: {lead} {answer}\n{self._lead_rules()}{rules}"
        return AnswerGrammar(grammar.kind, grammar.source, grammar.param, frame)

    def _lead(self, tail: str) -> str:
        """Return what comes before the answer proper, by how its prompt ends."""
        if self.reasoning is None:
            return ""
        begun = self.tokenizer.get_response_parser(dict(self.template), prefix=tail).initial_events
        states = [event["type"] for event in begun if event["field"] in _REASONING]
        if not states:
            return "(lead_open lead)?"
        return "" if states[-1] == "region_close" else "lead"

    def _lead_rules(self) -> str:
        if self.reasoning is None:
            return ""
        opening, closing = self.reasoning
        return f"lead_open: {self._literal(opening)}\n{self._until('lead', closing)}GAP: /[ \\n]{{1,4}}/\n"

    def _until(self, rule: str, closing: str) -> str:
        """Return the rule of any text up to ``closing``, and a gap."""
        if closing in self.marks:
            return f"{rule}: {_ANYTHING} {self._literal(closing)} GAP?\n"
        return f"{rule}: {rule}_end GAP?\n{rule}_end[lazy]: ANYTHING {json.dumps(closing)}\nANYTHING: {_ANYTHING}\n"

    def _calls(self, tools: Sequence[Tool], *, several: bool, begun: str = "") -> str:
        """Return the rules of ``calls``, the text of which has ``begun`` already."""
        form = {name: self.calls.get(name) or "" for name in ("open", "call", "close")}
        first = (form["open"] + form["call"]).removeprefix(begun)
        next_call = f"{self.calls.get('between')}{form['call']}"
        more = "more*" if several and self.calls.get("between") is not None else ""
        rules = [f"calls: ({_either('first', tools)}) {more} {self._literal(form['close'])}"]
        if more:
            rules.append(f"more: {_either('next', tools)}")
        for index, tool in enumerate(tools):
            function = function_of(tool)
            schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": json_style()}
            rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
            for name, call in (("first", first), ("next", next_call))[: 2 if more else 1]:
                before, _, after = call.replace("{name}", json.dumps(function["name"])[1:-1]).partition("{arguments}")
                rules.append(f"{name}_{index}: {self._literal(before)} arguments_{index} {self._literal(after)}")
        return "\n".join(rules) + "\n"

    def _literal(self, text: str) -> str:
        """Return a text in Lark's notation, with tokens of their own as such."""
        for mark, index in self.marks.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return f"{self._literal(before)} <[{index}]> {self._literal(after)}"
        return json.dumps(text) if text else ""


class ResponseReader:
    """Reads one answer as it comes. A call that cannot be parsed, such as one that is not JSON, is told as text, and so
    is all that follows."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._plain = False
        self._call = ""
        begun = [event for event in parser.initial_events if event["type"] == "region_open"]
        self._regions = len(begun)
        self._trims = bool(begun)

    def feed(self, text: str) -> ResponsePiece:
        """Take the next piece of the answer, and return what it is, as far as that is clear."""
        if self._plain:
            return ResponsePiece(content=text)
        before = vars(self) | {"_parser": copy.copy(self._parser)}
        try:
            return self._piece(self._parser.feed(text))
        except (ValueError, KeyError, TypeError):
            if len(text) < 2:
                return self._give_up()
            vars(self).update(before)  # to tell what stands before the call that cannot be parsed
            middle = len(text) // 2
            return self.feed(text[:middle]) + self.feed(text[middle:])

    def finish(self) -> ResponsePiece:
        """Return the rest: no more text comes."""
        if self._plain:
            return ResponsePiece()
        try:
            return self._piece(self._parser.finalize()[1])
        except (ValueError, KeyError, TypeError):
            return self._give_up()

    def _piece(self, events: Sequence[Mapping[str, Any]]) -> ResponsePiece:
        texts = {"content": "", "reasoning": ""}
        calls: list[ToolCall] = []
        for event in events:
            kind = "reasoning" if event["field"] in _REASONING else event["field"]
            match event["type"]:
                case "region_open":
                    self._regions += 1
                    self._trims = kind == "reasoning" or self._regions > 1
                    self._call = ""
                case "region_chunk" if kind == "tool_calls":
                    self._call += event["text"]
                case "region_chunk" if kind in texts:
                    texts[kind] += self._trimmed(event["text"])
                case "region_close" if kind == "tool_calls":
                    value = event["value"]
                    calls += [_tool_call(call) for call in (value if isinstance(value, list) else [value])]
        return ResponsePiece(texts["content"], texts["reasoning"], tuple(calls))

    def _trimmed(self, text: str) -> str:
        """Drop the space between a mark and the text behind it."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _give_up(self) -> ResponsePiece:
        """Return the call that is none as text."""
        self._plain = True
        return ResponsePiece(content=self._call)


def _either(rule: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(len(tools)))


def _tool_call(value: Mapping[str, Any]) -> ToolCall:
    """Make a call of what the parser found. Raises ValueError, KeyError or TypeError for what is none."""
    function = value["function"]
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(f"no call of a function: {value!r}")
    return ToolCall(new_call_id(), name, json.dumps(arguments, ensure_ascii=False))


def new_call_id() -> str:
    """Make an id for a call, of letters and digits."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(ID_LENGTH))


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, and the texts that patterns in it match literally."""
    if isinstance(value, str):
        yield value
        yield re.sub(r"\\([^\w\s])", r"\1", value)
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _without(template: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return a response template without these fields."""
    kept = {name: field for name, field in template["fields"].items() if name not in fields}
    return {**template, "fields": kept}
