"""Typed values for the contents of prompts: texts, token ids, and cached text at its place among
them.

HTTP bodies and the Python API's dictionaries become these values at the library's edge
(``kvlinker.service.content`` parses the latter). There cached text is still a ``CachedPart``;
``ContentReader`` puts the chunks in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvlinker.base.types.tools import Tool

Cached = TypeVar("Cached")
"""The type that stands for cached text: ``CachedPart``, or ``Chunk`` once that is looked up."""

MARKS = ("cache_control", "prompt_cache_breakpoint")
"""The fields of content parts and tools that mark them as chunks: Anthropic's and OpenAI's."""

Content = tuple[str | Cached, ...]
"""Fresh texts and cached text in the order in which the model reads them; nothing is added between
two parts."""


@dataclass(frozen=True, slots=True)
class ContextCacheReference:
    """Names a context cache by its ``id``; its chunk is to stand in this place."""

    id: str


class TextSource(StrEnum):
    """The reason why a text is to be a chunk."""

    MARK = "mark"
    """Its author marked it."""

    DOCUMENT = "document"
    """The text is a document, outside the messages."""

    RECOGNITION = "recognition"
    """The text is known, or was in an earlier prompt, without a mark by its author."""

    STRUCTURE = "structure"
    """The text is a piece of the prompt by the prompt's own structure."""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text that is to be a chunk, identified by its content: one that its author marked, a
    document, or one that was recognised."""

    text: str

    ttl: float | None = None
    """The seconds that its context cache is to live from its last use; None for the server's own
    time."""

    source: TextSource = field(default=TextSource.MARK, compare=False)


CachedPart = ContextCacheReference | MarkedText
"""A part of a prompt that is, or is to be, a chunk."""


class Implicit(StrEnum):
    """The texts of a prompt that become chunks without the id of a context cache."""

    STRUCTURE = "structure"
    """The pieces that the prompt's own structure names: definitions of tools, messages, paragraphs.
    Marks and documents mean nothing beyond that."""

    AUTO = "auto"
    """Marked texts and documents, and any long text that comes again, or that is known."""

    MARKED = "marked"
    """Marked texts and documents."""

    OFF = "off"
    """No text; marks are ignored."""


@dataclass(frozen=True, slots=True)
class Document(Generic[Cached]):
    """A document that a conversation is about, in addition to its messages."""

    text: str | Cached

    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """All else that chat templates may show of it, such as ``title``."""


@dataclass(frozen=True, slots=True)
class ChatMessage(Generic[Cached]):
    """One message of a conversation; ``name`` is the speaker's, or a tool's, for chat templates
    that show it."""

    role: str
    content: Content[Cached]
    name: str | None = None

    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """All else that chat templates may show of it, such as ``reasoning_content``."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Says how a chat template is rendered."""

    tools: tuple[Tool, ...] = field(default=(), hash=False)
    """The tools that the model may call; those with one of ``MARKS`` are to be chunks."""

    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Variables of the template's own, such as ``enable_thinking``."""

    add_generation_prompt: bool = True
    """False to leave out the header of the assistant's answer, with which prompts end otherwise."""

    continue_final_message: bool = False
    """True to leave the last message open, so that the answer goes on with it; there is no header
    then."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A completion's prompt that is given as token ids, which are taken as they are."""

    ids: tuple[int, ...]


CompletionPrompt = Content[Cached] | TokenIds
"""The prompt of a completion."""
