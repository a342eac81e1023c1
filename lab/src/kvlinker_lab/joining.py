"""Joins passages into one text, as frameworks for retrieval do, and tells what of it is
recognised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlinker.base.errors import InvalidRequestError
from kvlinker.prompting.segments import PromptText, Span, TokenPlaces

if TYPE_CHECKING:
    from kvlinker.service.implicit.caches import Recognizer

PLAIN = "Answer the question by the context.\n\n{context}\n\nQuestion: {question}\nAnswer:"

FRAMEWORKS = {
    "langchain": (
        (
            "langchain_classic.chains.question_answering.stuff_prompt",
            "langchain.chains.question_answering.stuff_prompt",
        ),
        "prompt_template",
    ),
    "llama-index": (("llama_index.core.prompts.default_prompts",), "DEFAULT_TEXT_QA_PROMPT_TMPL"),
}
"""Where packages that join texts have the templates that they use unless they are given another:
the modules of one version or another, and the name in it."""


class JoinedPrompt(NamedTuple):
    """Passages and a question in one text."""

    text: str
    passages: tuple[Span, ...]
    """Where the passages stand, without white space around them."""


@dataclass(frozen=True, slots=True)
class Template:
    """The form in which passages and a question become one text."""

    name: str
    text: str
    """The text, with ``{context}`` in the passages' place and ``{question}`` in the question's."""

    between: str = "\n\n"
    """Stands between two passages."""

    def join(self, passages: Sequence[str], question: str) -> JoinedPrompt:
        """Join the passages, without white space around them."""
        before, behind = self.text.split("{context}")
        text, spans = before.replace("{question}", question), []
        for index, passage in enumerate(passages):
            text += self.between if index else ""
            spans.append((len(text), len(text) + len(passage.strip())))
            text += passage.strip()
        return JoinedPrompt(text + behind.replace("{question}", question), tuple(spans))


def find_template(name: str) -> Template:
    """Return kvlinker's own template, ``plain``, that of a framework which is installed, or the one
    that ``name`` spells. Raises InvalidRequestError."""
    if name == "plain":
        return Template(name, PLAIN)
    if name in FRAMEWORKS:
        return Template(name, _framework_template(name))
    if name.count("{context}") != 1 or name.count("{question}") != 1:
        raise InvalidRequestError(
            f"{name!r} is no template: give plain, {', '.join(FRAMEWORKS)}, or a text that has"
            " {context} and {question} once each.",
            param="template",
        )
    return Template("own", name)


def _framework_template(name: str) -> str:
    modules, attribute = FRAMEWORKS[name]
    for module in modules:
        try:
            text: str = getattr(import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
        return text.replace("{context_str}", "{context}").replace("{query_str}", "{question}")
    raise InvalidRequestError(
        f"The template of {name} comes from that package, which is not installed. Install it, or"
        " spell a template with {context} and {question}.",
        param="template",
    )


class Recognised(NamedTuple):
    """The marks in a joined text, compared with its passages. Counts are characters, except
    ``whole``."""

    passages: int
    """All characters of passages."""

    inside: int
    """Characters of passages that were marked."""

    outside: int
    """Characters that were marked and are in no passage."""

    whole: int
    """The number of passages that are one mark each, from their first character to their last."""


def recognise(recognizer: Recognizer, joined: JoinedPrompt, *, tenant: str) -> Recognised:
    """Recognise the passages of a text, and compare the marks with the passages in it."""
    text = PromptText(joined.text, TokenPlaces(np.arange(0), np.arange(0)))
    found = recognizer.read([text], tenant=tenant)
    marks = [(passage.begin, passage.end) for passage in found.chunks]
    inside = sum(_overlap(mark, passage) for mark in marks for passage in joined.passages)
    return Recognised(
        passages=sum(end - begin for begin, end in joined.passages),
        inside=inside,
        outside=sum(end - begin for begin, end in marks) - inside,
        whole=len(set(marks).intersection(joined.passages)),
    )


def _overlap(one: Span, other: Span) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
