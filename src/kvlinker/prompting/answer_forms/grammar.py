"""Makes grammars, in llguidance's dialect of Lark, of the form in which one model reasons and calls
tools."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvlinker.base.types.tools import Tool, function_of
from kvlinker.prompting.answer_forms.calls import CallForm
from kvlinker.prompting.answer_forms.schemas import call_schemas

_ANYTHING = r"/(?s:.*)/"


@dataclass(frozen=True)
class FormRules:
    """Writes the rules of one form's grammars."""

    calls: CallForm
    reasoning: tuple[str, str] | None

    marks: Mapping[str, int]
    """The texts of the form that are tokens of their own, with their ids."""

    other_tokens: Collection[int]
    """The ids of all other tokens that are no plain text, which may come in a text."""

    most_reasoning: int | None = None
    """The most tokens of reasoning, where its end is a token of its own."""

    def called(self, lead: str, tools: Sequence[Tool], *, several: bool) -> str:
        """Return the grammar of answers that call one of ``tools``, or ``several`` times some of
        them, after the rule ``lead``."""
        rules = self._calls(tools, several=several)
        return f"start: {lead} calls\n{self._lead_rules()}{rules}"

    def free(self, lead: str, tools: Sequence[Tool], *, several: bool) -> str:
        """Return the grammar of answers of any text, which may end with calls of ``tools``."""
        trigger = self.calls.trigger
        rules = self._calls(tools, several=several, begun=trigger or "", lenient=True)
        if trigger is None:
            return (
                f"start: {lead} (TEXT | calls)\nTEXT: /([^{{\\s](?s:.*))?/\n{self._lead_rules()}"
                f"{rules}"
            )
        begun = ["begun calls"]
        if trigger in self.marks:
            begun.append(f"TEXT {self._literal(trigger)} calls")
        others = f"<[{_ranges(self.other_tokens)}]>"
        parts = f"({others} | TEXT {others})*" if self.other_tokens else ""
        return (
            f"start: {lead} {parts} (TEXT | {' | '.join(begun)})\nTEXT: {self._text()}\n"
            f"begun[lazy]: TEXT {json.dumps(trigger)}\n{self._lead_rules()}{rules}"
        )

    def reasoned(self, lead: str) -> str:
        """Return the grammar of answers of any text after the rule ``lead``."""
        others = f"<[{_ranges(self.other_tokens)}]>"
        parts = f"({others} | TEXT {others})*" if self.other_tokens else ""
        return f"start: {lead} {parts} TEXT\nTEXT: {self._text()}\n{self._lead_rules()}"

    def frame(self, lead: str, tools: Sequence[Tool], *, several: bool) -> str:
        """Return the grammar of the frame around ``@answer``, which calls may replace; empty for
        nothing."""
        if not lead and not tools:
            return ""
        answer = "(calls | @answer)" if tools else "@answer"
        rules = self._calls(tools, several=several, lenient=True) if tools else ""
        return f"start: {lead} {answer}\n{self._lead_rules()}{rules}"

    def _text(self) -> str:
        """Return the terminal of any text; text that begins like reasoning is reasoning."""
        if self.reasoning is None:
            return _ANYTHING
        return f"{_ANYTHING} & ~/(?s:\\s*{_pattern(self.reasoning[0])}.*)/"

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
            most = self.most_reasoning
            if most == 0:
                return f"{rule}: {self._literal(closing)} GAP?\n"
            limit = "" if most is None else f"[max_tokens={most}]"
            text = f"{rule}_text{limit}: {_ANYTHING}\n"
            return f"{rule}: {rule}_text {self._literal(closing)} GAP?\n{text}"
        return (
            f"{rule}: {rule}_end GAP?\n{rule}_end[lazy]: ANYTHING {json.dumps(closing)}\nANYTHING:"
            f" {_ANYTHING}\n"
        )

    def _calls(
        self, tools: Sequence[Tool], *, several: bool, begun: str = "", lenient: bool = False
    ) -> str:
        """Return the rules of ``calls``, the text of which has ``begun`` already. ``lenient``:
        schemas of functions that are not strict are followed as far as they can be."""
        form = self.calls
        repeats = several and form.between is not None
        tail = self._literal(form.tail)
        rules = [
            f"calls: ({_either('first', tools)}) {'more*' if repeats else ''}"
            f" {self._literal(form.closing)}"
        ]
        if repeats:
            rules.append(f"more: {_either('next', tools)}")
        for index, schema in enumerate(call_schemas(tools, lenient=lenient)):
            name = function_of(tools[index])["name"]
            heads = {"first": form.first_head(name).removeprefix(begun)}
            if repeats:
                heads["next"] = form.next_head(name)
            rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
            rules += [
                f"{rule}_{index}: {self._literal(head)} arguments_{index} {tail}"
                for rule, head in heads.items()
            ]
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


def _pattern(text: str) -> str:
    """Return the regular expression of a text, as it is written between slashes."""
    return re.escape(text).replace("/", r"\/")


def _ranges(ids: Collection[int]) -> str:
    """Return numbers as ranges, such as ``1-3,7-7``."""
    return ",".join(f"{first}-{last}" for first, last in _runs(ids))


def _runs(ids: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of neighbouring numbers, in order."""
    known = set(ids)
    for first in sorted(index for index in known if index - 1 not in known):
        last = first
        while last + 1 in known:
            last += 1
        yield first, last
