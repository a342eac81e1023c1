"""One model's form of answers in a conversation: makes grammars that enforce it, and readers that
separate reasoning and calls of tools from text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvlinker.base.types.call_marks import CallMarks
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.tools import Tool, function_of
from kvlinker.prompting.answer_forms import form_for
from kvlinker.prompting.answer_forms.calls import CallForm
from kvlinker.prompting.answer_forms.grammar import FormRules
from kvlinker.prompting.answer_forms.reader import AnswerReader, Reader
from kvlinker.prompting.answer_forms.template_reader import TemplateReader


@dataclass(frozen=True)
class AnswerForm:
    """Knows how one model writes reasoning and calls. Any thread may use it."""

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
    """Those of ``marks`` that are special tokens: they have to be seen in an answer to read it."""

    other_tokens: frozenset[int]
    """The ids of all other tokens that are no plain text, but for the one that ends answers."""

    most_reasoning: int | None = None
    """The most tokens of reasoning; None for any number."""

    @property
    def can_limit_reasoning(self) -> bool:
        """True if the model reasons between tokens of their own, so that it can be made to end."""
        return self.reasoning is not None and all(mark in self.marks for mark in self.reasoning)

    def limited(self, most_reasoning: int | None) -> AnswerForm:
        """Return the form of answers that reason in at most so many tokens."""
        return replace(self, most_reasoning=most_reasoning)

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
            CallForm.of(known["calls"]),
            template,
            {token.content: index for index, token in marks.items()},
            frozenset(index for index, token in marks.items() if token.special),
            frozenset(added.keys() - marks.keys() - {tokenizer.eos_token_id}),
        )

    def reader(self, tail: str, tools: Sequence[Tool], *, only_calls: bool = False) -> Reader:
        """Return a reader of one answer. ``tail`` is the end of its prompt, special tokens
        included; without ``tools``, text that looks like a call is text. ``only_calls``: apart from
        reasoning, there are only calls, enforced by a grammar."""
        if self.template is not None and not only_calls:
            return TemplateReader(self.template, tools, tail=tail)
        return self._reader(tail, tools, only_calls=only_calls)

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
        source = self._rules.called(self._lead(tail), tools, several=several)
        return AnswerGrammar("lark", source, "tools")

    def free_grammar(
        self, tools: Sequence[Tool], *, tail: str, several: bool
    ) -> AnswerGrammar | None:
        """Return the grammar of answers of any text, which may end with calls of ``tools``: one, or
        ``several``. None if the model's own form of calls is not known."""
        if self.template is not None:
            return None
        source = self._rules.free(self._lead(tail), tools, several=several)
        return AnswerGrammar("lark", source, "tools")

    def reasoning_grammar(self, tail: str) -> AnswerGrammar | None:
        """Return the grammar of answers of any text after limited reasoning; None if there is no
        limit, or no reasoning."""
        lead = self._lead(tail)
        if self.most_reasoning is None or not lead:
            return None
        return AnswerGrammar("lark", self._rules.reasoned(lead), "reasoning")

    def framed(
        self, grammar: AnswerGrammar, *, tail: str, tools: Sequence[Tool] = (), several: bool = True
    ) -> AnswerGrammar:
        """Return a grammar of answers that may reason before they follow ``grammar``, or call one
        of ``tools`` instead."""
        callable_tools = tools if self.template is None else ()
        frame = self._rules.frame(self._lead(tail), callable_tools, several=several)
        return AnswerGrammar(grammar.kind, grammar.source, grammar.param, frame)

    @cached_property
    def _rules(self) -> FormRules:
        return FormRules(
            self.calls, self.reasoning, self.marks, self.other_tokens, self.most_reasoning
        )

    def _lead(self, tail: str) -> str:
        """Return the text before the answer proper, by the end of its prompt."""
        reader = self._reader(tail, ())
        if reader.may_reason:
            return "(lead_open lead)?"
        return "lead" if reader.reasons else ""

    def _reader(
        self, tail: str, tools: Sequence[Tool], *, only_calls: bool = False
    ) -> AnswerReader:
        names = [function_of(tool)["name"] for tool in tools]
        begun = self._begun(tail)
        return AnswerReader(self.reasoning, self.calls, names, begun=begun, only_calls=only_calls)

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


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, and the texts that patterns in it match literally."""
    if isinstance(value, str):
        yield value
        yield re.sub(r"\\([^\w\s])", r"\1", value)
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
