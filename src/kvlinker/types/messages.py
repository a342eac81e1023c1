"""Typed values for all that callers put into prompts: texts, token ids, and cached text at its place among them.

HTTP bodies and the Python API's dictionaries become these values at the library's edge (``kvlinker.content`` parses the
latter). There cached text is still a ``ContextCacheReference``; ``ContentReader`` puts the chunks in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Cached = TypeVar("Cached")
"""The type that stands for cached text: ``ContextCacheReference``, or ``Chunk`` once that is looked up."""

Content = tuple[str | Cached, ...]
"""Fresh texts and cached text in the order in which the model reads them; nothing is added between two parts."""


@dataclass(frozen=True, slots=True)
class ContextCacheReference:
    """Names a context cache by its ``id``; its chunk is to stand in this place."""

    id: str


@dataclass(frozen=True, slots=True)
class ChatMessage(Generic[Cached]):
    """One message of a conversation; ``name`` is the speaker's, for chat templates that show it."""

    role: str
    content: Content[Cached]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A completion's prompt that is given as token ids, which are taken as they are."""

    ids: tuple[int, ...]


CompletionPrompt = Content[Cached] | TokenIds
"""The prompt of a completion."""
