"""Knows one model's form of answers in a conversation: makes grammars that enforce it, and readers
that tell reasoning and calls of tools from text.

Readers follow the response template that the tokenizer brings, or one of the folder's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlinker.base.types.grammars import AnswerGrammar, json_style
from kvlinker.base.types.tools import Tool, function_of
from kvlinker.prompting.answer_forms import REASONING_FIELDS, form_for
from kvlinker.prompting.answer_forms.reader import AnswerParser, AnswerReader

_ANYTHING = r"/(?s:.*)/"


@dataclass(frozen=True)
class AnswerForm:
    """Knows how one model writes reasoning and calls. Any thread may use it."""

    template: Mapping[str, Any]
    """Transformers' response template."""

    reasoning: tuple[str, str] | None
    """The texts around reasoning; None for a model that does not reason, or in a way that is not
    known."""

    calls: Mapping[str, str | None]
    """The form of calls, as in the folder's files."""

    marks: Mapping[str, int]
    """The texts of the form that are tokens of their own, with their ids."""

    shown_tokens: frozenset[int]
    """Those of ``marks`` that are special tokens: they have to be seen in an answer to read it."""

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str | None) -> AnswerForm:
        """Find the form of a model by its tokenizer and its chat template."""
        known = form_for(chat_template or "")
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        thoughts = known.get("reasoning")
        reasoning = None
        if thoughts is not None and thoughts["when"] in (chat_template or ""):
            reasoning = (thoughts["open"], thoughts["close"])
        own = getattr(tokenizer, "response_template", None)
        template = own or _without(
            known["response_template"], () if reasoning else REASONING_FIELDS
        )
        texts = [*_texts(template["fields"]), *_texts(known["calls"]), *(reasoning or ())]
        marks = {
            index: token
            for index, token in added.items()
            if any(token.content in text for text in texts)
        }
        return cls(
            template,
            reasoning,
            known["calls"],
            {token.content: index for index, token in marks.items()},
            frozenset(index for index, token in marks.items() if token.special),
        )

    def reader(self, tail: str, tools: Sequence[Tool]) -> AnswerReader:
        """Return a reader of one answer. ``tail`` is the end of its prompt, special tokens
        included; without ``tools``, text that looks like a call is text."""
        template = self.template if tools else _without(self.template, ("tool_calls",))
        return AnswerReader(
            AnswerParser(dict(template), prefix=tail, tools=[dict(tool) for tool in tools])
        )

    def calls_grammar(self, tools: Sequence[Tool], *, tail: str, several: bool) -> AnswerGrammar:
        """Return the grammar of answers that call one of ``tools``, or ``several`` times some of
        them."""
        rules = self._calls(tools, several=several)
        return AnswerGrammar(
            "lark", f"start: {self._lead(tail)} calls\n{self._lead_rules()}{rules}", "tools"
        )

    def free_grammar(self, tools: Sequence[Tool], *, tail: str, several: bool) -> AnswerGrammar:
        """Return the grammar of answers of any text, which may end with calls of ``tools``: one, or
        ``several``."""
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
        """Return a grammar of answers that may reason before they follow ``grammar``, or call one
        of ``tools`` instead."""
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
        begun = AnswerParser(dict(self.template), prefix=tail).initial_events
        states = [event["type"] for event in begun if event["field"] in REASONING_FIELDS]
        if not states:
            return "(lead_open lead)?"
        return "" if states[-1] == "region_close" else "lead"

    def _lead_rules(self) -> str:
        if self.reasoning is None:
            return ""
        opening, closing = self.reasoning
        return (
            f"lead_open: {self._literal(opening)}\n{self._until('lead', closing)}GAP: /["
            " \\n]{1,4}/\n"
        )

    def _until(self, rule: str, closing: str) -> str:
        """Return the rule of any text up to ``closing``, and a gap."""
        if closing in self.marks:
            return f"{rule}: {_ANYTHING} {self._literal(closing)} GAP?\n"
        return (
            f"{rule}: {rule}_end GAP?\n{rule}_end[lazy]: ANYTHING {json.dumps(closing)}\nANYTHING:"
            f" {_ANYTHING}\n"
        )

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
            schema = {
                "type": "object",
                **(function.get("parameters") or {}),
                "x-guidance": json_style(),
            }
            rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
            for name, call in (("first", first), ("next", next_call))[: 2 if more else 1]:
                before, _, after = call.replace(
                    "{name}", json.dumps(function["name"])[1:-1]
                ).partition("{arguments}")
                rules.append(
                    f"{name}_{index}: {self._literal(before)} arguments_{index}"
                    f" {self._literal(after)}"
                )
        return "\n".join(rules) + "\n"

    def _literal(self, text: str) -> str:
        """Return a text in Lark's notation, with tokens of their own as such."""
        for mark, index in self.marks.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return f"{self._literal(before)} <[{index}]> {self._literal(after)}"
        return json.dumps(text) if text else ""


def _either(rule: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(len(tools)))


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
