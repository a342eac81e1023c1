"""What users put into prompts: text, token ids and context caches, and how it becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlinker.context_caches import ContextCaches
from kvlinker.errors import InvalidRequestError
from kvlinker.prompt.builder import PromptBuilder
from kvlinker.prompt.chat import ChatMessage
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ContextCache
from kvlinker.types.chunks import Chunk

ContentPart = str | ContextCache | Mapping[str, Any]
"""Text, a context cache, or one of the HTTP API's parts."""

Message = Mapping[str, Any]
"""``role`` and ``content``, which is text or a list of ContentPart."""

CompletionContent = str | Sequence[int] | Sequence[ContentPart]
"""Text, token ids, or a list of texts and context caches."""


class ContentReader:
    """Makes prompts of what users write, and of the chunks that their context caches stand for."""

    def __init__(self, builder: PromptBuilder, caches: ContextCaches) -> None:
        self._builder = builder
        self._caches = caches

    def chat(self, messages: Sequence[Message], *, tenant: str) -> Prompt:
        """The prompt of a conversation. Raises InvalidRequestError and ContextCacheNotFoundError."""
        built = []
        for message in messages:
            content = message.get("content")
            parts: Sequence[ContentPart] = (content,) if isinstance(content, str) else content or ()
            content_parts = tuple(self._part(part, tenant) for part in parts)
            built.append(ChatMessage(message["role"], content_parts, message.get("name")))
        return self._builder.chat(built)

    def completion(self, content: CompletionContent, *, tenant: str) -> Prompt:
        """The prompt of a completion. Raises InvalidRequestError and ContextCacheNotFoundError."""
        if isinstance(content, str):
            return self._builder.completion(content)
        if all(isinstance(part, int) for part in content):
            return self._builder.completion([part for part in content if isinstance(part, int)])
        parts = [self._part(part, tenant) for part in content if not isinstance(part, int)]
        if len(parts) != len(content):
            raise InvalidRequestError("'prompt' mixes token ids with texts or context caches.", param="prompt")
        return self._builder.completion(parts)

    def cache_ids(self, messages: Sequence[Message], *, tenant: str) -> dict[str, str]:
        """The ids of the context caches in ``messages``, by what their chunks contain (``Chunk.content``)."""
        parts = [part for message in messages for part in _listed(message.get("content"))]
        ids = [cache_id for part in parts if (cache_id := _cache_id(part))]
        return {self._caches.chunk(cache_id, tenant=tenant).content: cache_id for cache_id in ids}

    def _part(self, part: ContentPart, tenant: str) -> str | Chunk:
        if isinstance(part, str):
            return part
        if isinstance(part, ContextCache):
            return self._caches.chunk(part.id, tenant=tenant)
        if part.get("type") == "text":
            return str(part["text"])
        if part.get("type") == "context_cache":
            return self._caches.chunk(part["id"], tenant=tenant)
        raise InvalidRequestError(
            f"Content part of type {part.get('type')!r}: only 'text' and 'context_cache' are supported.",
            param="messages",
        )


def _listed(content: Any) -> Sequence[Any]:
    """The parts of a message's content or of a prompt that may be context caches."""
    return () if content is None or isinstance(content, str) else content


def _cache_id(part: Any) -> str | None:
    if isinstance(part, ContextCache):
        return part.id
    return part["id"] if isinstance(part, Mapping) and part.get("type") == "context_cache" else None
