"""Writes conversations as requests: with documents as context caches, as plain or marked text, or
reordered for prefix hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvlinker_lab.load.traffic import Conversation

PLAIN, REORDERED = "plain", "reordered"
"""Documents as text, in the order of the traffic or in one that prefix caches find again: in place
of a policy."""

Content = str | list[dict[str, Any]]


class DocumentForm(Protocol):
    """The form of documents in a prompt."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Fields of the request's body that go with it."""

    def content(self, documents: Sequence[int], text: str) -> Content:
        """Write the content of a message: documents, and a text after them."""


@dataclass(frozen=True, slots=True)
class CachedDocuments:
    """Writes documents as context caches, to be linked by a policy."""

    ids: Sequence[str]
    """The context caches' ids, by document."""
    policy: str

    @property
    def options(self) -> Mapping[str, Any]:
        return {"link": {"policy": self.policy}}

    def content(self, documents: Sequence[int], text: str) -> Content:
        parts: list[dict[str, Any]] = [
            {"type": "context_cache", "id": self.ids[document]} for document in documents
        ]
        return [*parts, {"type": "text", "text": text}] if text else parts


@dataclass(frozen=True, slots=True)
class PlainDocuments:
    """Writes documents as text, which every OpenAI-compatible server takes."""

    texts: Sequence[str]

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def content(self, documents: Sequence[int], text: str) -> Content:
        return "".join([*(self.texts[document] for document in documents), text])


@dataclass(frozen=True, slots=True)
class MarkedDocuments:
    """Writes documents as marked texts, of which the server makes context caches by itself."""

    texts: Sequence[str]
    policy: str

    @property
    def options(self) -> Mapping[str, Any]:
        return {"link": {"policy": self.policy}}

    def content(self, documents: Sequence[int], text: str) -> Content:
        mark = {"type": "ephemeral"}
        parts = [
            {"type": "text", "text": self.texts[document], "cache_control": mark}
            for document in documents
        ]
        return [*parts, {"type": "text", "text": text}] if text else parts


def write_request(
    conversation: Conversation, answers: Sequence[str], form: DocumentForm, *, model: str
) -> dict[str, Any]:
    """Write the body of the chat completion for the turn after ``answers``, those to all turns
    before it.

    Exactly the turn's number of tokens is asked for, sampled greedily and streamed, with the usage
    at the end.
    """
    messages: list[dict[str, Any]] = []
    if conversation.preamble:
        messages.append({"role": "system", "content": form.content(conversation.preamble, "")})
    for turn, answer in zip(conversation.turns, answers, strict=False):
        messages.append({"role": "user", "content": form.content(turn.documents, turn.question)})
        messages.append({"role": "assistant", "content": answer})
    turn = conversation.turns[len(answers)]
    messages.append({"role": "user", "content": form.content(turn.documents, turn.question)})
    return {
        "model": model,
        "messages": messages,
        "max_tokens": turn.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **form.options,
    }


@dataclass(slots=True)
class PrefixIndex:
    """Remembers in which orders documents were sent, to put those of new prompts into an order that
    begins alike.

    This is ContextPilot's way, request by request: the longest known beginning that has only
    documents of this prompt comes first. The others follow in order of how often they were asked
    for, so that beginnings come to be shared. A prompt is exact for the order that it has.
    """

    _root: _Node = field(default_factory=lambda: _Node())
    _asked: Counter[int] = field(default_factory=Counter)

    def reorder(self, conversation: Conversation) -> Conversation:
        """Reorder the documents of the first turn, and remember the order. Later turns follow
        answers, which no two conversations share."""
        first, *others = conversation.turns
        return replace(
            conversation, turns=(replace(first, documents=self.arrange(first.documents)), *others)
        )

    def arrange(self, documents: Sequence[int]) -> tuple[int, ...]:
        """Put the documents into the order of the longest known beginning, and remember it."""
        self._asked.update(documents)
        known = max(self._root.beginnings(frozenset(documents)), key=len)
        rest = sorted(
            set(documents) - set(known), key=lambda one: (-self._asked[one], documents.index(one))
        )
        ordered = (*known, *rest)
        node = self._root
        for document in ordered:
            node = node.following.setdefault(document, _Node())
        return ordered


@dataclass(slots=True)
class _Node:
    """Stands for a beginning of prompts: a path from the root of a prefix tree."""

    following: dict[int, _Node] = field(default_factory=dict)

    def beginnings(self, documents: frozenset[int]) -> Iterator[tuple[int, ...]]:
        """Yield all paths from here that have only these documents, the empty one first."""
        yield ()
        for document, node in self.following.items():
            if document in documents:
                for path in node.beginnings(documents - {document}):
                    yield (document, *path)
