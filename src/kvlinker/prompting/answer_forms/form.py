"""One model's form of answers in a conversation: makes grammars that enforce it, and readers that
separate reasoning and calls of tools from text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvlinker.base.types.call_marks import CallMarks
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.tools import Tool, function_of
from kvlinker.prompting.answer_forms import form_for
from kvlinker.prompting.answer_forms.calls import CallForm, call_schemas
from kvlinker.prompting.answer_forms.reader import AnswerReader, Reader
from kvlinker.prompting.answer_forms.template_reader import TemplateReader

_ANYTHING = r"/(?s:.*)/"


@dataclass(frozen=True)
class AnswerForm:
    """Knows how one model writes reasoning and calls. Any thread may use it.

    Its grammars are in llguidance's dialect of Lark.
    """

    turn: str | None
    """The text before an answer in a prompt; None if that is not known."""

    reasoning: tuple[str, str] | None
    """The texts around reasoning; None for a model that does not reason, or in a way that is not
    known."""

    calls: CallForm

    template: Mapping[str, Any] | None
    """Transformers' response template, which says how the model writes calls of its own accord;
    None if it writes them as ``calls`` does."""

    marks: Mapping[str, int]
    """The texts of the form that are tokens of their own, with their ids."""

    shown_tokens: frozenset[int]
    """The ``marks`` that are special tokens: a reader of answers has to see them."""

    other_tokens: frozenset[int]
    """The ids of all other tokens that are no plain text, without the one that ends answers."""

    most_reasoning: int | None = None
    """The most tokens of reasoning; None for any number."""

    @cached_property
    def can_limit_reasoning(self) -> bool:
        """True if the model reasons between tokens of their own, so that it can be made to end."""
        return self.reasoning is not None and all(mark in self.marks for mark in self.reasoning)

    def limited(self, most_reasoning: int | None) -> AnswerForm:
        """Return the form of answers that reason in at most ``most_reasoning`` tokens."""
        return replace(self, most_reasoning=most_reasoning)

    def without_bare_calls(self) -> AnswerForm:
        """Return the form in which JSON without the marks of a call is text."""
        return replace(self, calls=replace(self.calls, bare=None))

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str | None) -> AnswerForm:
        """Find the form of a model by its tokenizer and its chat template. A response template of
        the tokenizer's is followed where no form is known."""
        known = form_for(chat_template or "")
        template = None if known["when"] else getattr(tokenizer, "response_template", None)
        thoughts = known.get("reasoning")
        reasoning = None
        if thoughts is not None and thoughts["when"] in (chat_template or ""):
            reasoning = (thoughts["open"], thoughts["close"])
        texts = [*_texts(known["calls"]), *(reasoning or ()), *_texts(template)]
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        marks = {
            index: token
            for index, token in added.items()
            if any(token.content in text for text in texts)
        }
        return cls(
            known["turn"],
            reasoning,
            CallForm.of(known["calls"], chat_template or ""),
            template,
            {token.content: index for index, token in marks.items()},
            frozenset(index for index, token in marks.items() if token.special),
            frozenset(added.keys() - marks.keys() - {tokenizer.eos_token_id}),
        )

    def reader(
        self,
        tail: str,
        tools: Sequence[Tool],
        *,
        only_calls: bool = False,
        most_calls: int | None = None,
    ) -> Reader:
        """Return a reader of one answer. ``tail`` is the end of its prompt, special tokens
        included; without ``tools``, text that looks like a call is text. ``only_calls``: apart from
        reasoning, there are only calls, enforced by a grammar. ``most_calls``: the calls after
        which the answer is over."""
        if self.template is not None and not only_calls:
            return TemplateReader(self.template, tools, tail=tail, most_calls=most_calls)
        return self._reader(tail, tools, only_calls=only_calls, most_calls=most_calls)

    def call_marks(self, tools: Sequence[Tool]) -> CallMarks | None:
        """Return the marks with which calls of ``tools`` begin in a text; None if they are not
        known."""
        if self.template is not None or not tools:
            return None
        if self.calls.trigger is not None:
            return CallMarks((self.calls.trigger,), anywhere=True)
        heads = (self.calls.first_head(function_of(tool)["name"]) for tool in tools)
        return CallMarks(tuple(heads), anywhere=False)

    def calls_grammar(self, tools: Sequence[Tool], *, tail: str, several: bool) -> AnswerGrammar:
        """Return the grammar of answers that call one of ``tools``, or ``several`` times some of
        them."""
        calls = self._calls(tools, several=several)
        source = f"start: {self._lead(tail)} calls\n{self._lead_rules()}{calls}"
        return AnswerGrammar("lark", source, "tools")

    def free_grammar(
        self, tools: Sequence[Tool], *, tail: str, several: bool
    ) -> AnswerGrammar | None:
        """Return the grammar of answers of any text, which may end with calls of ``tools``: one, or
        ``several``. None if the model's own form of calls is not known."""
        if self.template is not None:
            return None
        trigger = self.calls.trigger
        lead = self._lead(tail)
        rules = self._lead_rules() + self._calls(
            tools, several=several, begun=trigger or "", lenient=True
        )
        if trigger is None:
            source = f"start: {lead} (TEXT | calls)\nTEXT: /([^{{\\s](?s:.*))?/\n{rules}"
        else:
            begun = ["begun calls"]
            if trigger in self.marks:
                begun.append(f"TEXT {self._literal(trigger)} calls")
            text = self._text
            if self.calls.bare is not None:
                begun.append("bare_calls")
                names = "|".join(_pattern(function_of(tool)["name"]) for tool in tools)
                text += f" & ~/(?s:(.*\\n)?[ \\t]*{self.calls.bare_pattern(f'({names})')}.*)/"
                rules += self._bare_calls(tools, several=several)
            source = (
                f"start: {lead} {self._parts} (TEXT | {' | '.join(begun)})\nTEXT: {text}\n"
                f"begun[lazy]: TEXT {json.dumps(trigger)}\n{rules}"
            )
        return AnswerGrammar("lark", source, "tools")

    def reasoning_grammar(self, tail: str) -> AnswerGrammar | None:
        """Return the grammar of answers of any text after limited reasoning; None if there is no
        limit, or no reasoning."""
        lead = self._lead(tail)
        if self.most_reasoning is None or not lead:
            return None
        source = f"start: {lead} {self._parts} TEXT\nTEXT: {self._text}\n{self._lead_rules()}"
        return AnswerGrammar("lark", source, "reasoning")

    def framed(
        self, grammar: AnswerGrammar, *, tail: str, tools: Sequence[Tool] = (), several: bool = True
    ) -> AnswerGrammar:
        """Return a grammar of answers that may reason before they follow ``grammar``, or call one
        of ``tools`` instead."""
        lead = self._lead(tail)
        callable_tools = tools if self.template is None else ()
        frame = ""
        if callable_tools:
            calls = self._calls(callable_tools, several=several, lenient=True)
            frame = f"start: {lead} (calls | @answer)\n{self._lead_rules()}{calls}"
        elif lead:
            frame = f"start: {lead} @answer\n{self._lead_rules()}"
        return AnswerGrammar(grammar.kind, grammar.source, grammar.param, frame)

    def _lead(self, tail: str) -> str:
        """Return the text before the answer proper, by the end of its prompt."""
        reader = self._reader(tail, ())
        if reader.may_reason:
            return "(lead_open lead)?"
        return "lead" if reader.reasons else ""

    def _reader(
        self,
        tail: str,
        tools: Sequence[Tool],
        *,
        only_calls: bool = False,
        most_calls: int | None = None,
    ) -> AnswerReader:
        return AnswerReader(
            self.reasoning,
            self.calls,
            [function_of(tool)["name"] for tool in tools],
            begun=self._begun(tail),
            only_calls=only_calls,
            most_calls=most_calls,
        )

    def _begun(self, tail: str) -> str:
        """Return the part of the answer that a prompt with this ``tail`` already has."""
        if self.turn is not None:
            _, turn, begun = tail.rpartition(self.turn)
            return begun if turn else ""
        if self.reasoning is None:
            return ""
        opening, closing = map(re.escape, self.reasoning)
        found = re.search(rf"{opening}\s*(?:{closing}\s*)?\Z", tail)
        return found[0] if found else ""

    @cached_property
    def _parts(self) -> str:
        """The rule of the texts before an answer's last one, with other tokens between."""
        others = f"<[{_ranges(self.other_tokens)}]>"
        return f"({others} | TEXT {others})*" if self.other_tokens else ""

    @property
    def _text(self) -> str:
        """The terminal of any text; text that begins like reasoning is reasoning."""
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
            f"calls: ({_either('first', tools)})"
            f" {'more*' if repeats else ''}"
            f" {self._literal(form.closing)} AFTER?",
            r"AFTER: /[ \n\r\t]{1,8}/",
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

    def _bare_calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return the rules of ``bare_calls``, which follow a text, and have the arguments and the
        space that ``_calls`` defines."""
        more = f" (AFTER? ({_either('next_bare', tools)}))*" if several else ""
        rules = [f"bare_calls: ({_either('bare', tools)}){more} AFTER?", r"BRACE: /\s*\}/"]
        for index, tool in enumerate(tools):
            name = _pattern(function_of(tool)["name"])
            head = self.calls.bare_pattern(name)
            behind = f'AFTER? arguments_{index} BRACE (AFTER? "```")?'
            rules += [
                f"bare_{index}: bare_head_{index} {behind}",
                f"bare_head_{index}[lazy]: /(?s:(.*\\n)?)[ \\t]*{head}/",
            ]
            if several:
                head = self.calls.bare_pattern(name, is_next=True)
                rules += [
                    f"next_bare_{index}: next_bare_head_{index} {behind}",
                    f"next_bare_head_{index}[lazy]: /{head}/",
                ]
        return "\n".join(rules) + "\n"

    def _literal(self, text: str) -> str:
        """Return a text in Lark's notation, with tokens of their own as such."""
        for mark, index in self.marks.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return f"{self._literal(before)} <[{index}]> {self._literal(after)}"
        return json.dumps(text) if text else ""


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, and the texts that patterns in it match literally."""
    if isinstance(value, str):
        yield value
        yield re.sub(r"\\([^\w\s])", r"\1", value)
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


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
