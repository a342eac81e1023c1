"""Parts of contents, with chunks in the places of context caches and of marked texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    Content,
    ContextCacheReference,
    MarkedText,
)

Chunks = Mapping[CachedPart, Chunk]
"""The chunks of parts; a marked text that is not among them stays text."""


def note_places(content: Content[CachedPart], path: str, places: dict[str, str]) -> None:
    """Add the path of each id that is not in ``places`` yet, such as
    ``messages.0.content.1.id``."""
    for index, part in enumerate(content):
        if isinstance(part, ContextCacheReference):
            places.setdefault(part.id, f"{path}.{index}.id")


def texts_of(parts: Iterable[str | CachedPart]) -> list[str]:
    """Return all texts among the parts, marked or not."""
    return [
        part if isinstance(part, str) else part.text
        for part in parts
        if not isinstance(part, ContextCacheReference)
    ]


def with_chunks(message: ChatMessage[CachedPart], chunks: Chunks) -> ChatMessage[Chunk]:
    return ChatMessage(message.role, placed(message.content, chunks), message.name, message.fields)


def placed(content: Content[CachedPart], chunks: Chunks) -> Content[Chunk]:
    return tuple(chunk_or_text(part, chunks) for part in content)


def chunk_or_text(part: str | CachedPart, chunks: Chunks) -> str | Chunk:
    if isinstance(part, MarkedText):
        return chunks.get(part, part.text)
    return part if isinstance(part, str) else chunks[part]
