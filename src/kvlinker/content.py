"""Parses the content of the Python API's calls, and looks up context caches, to make prompts for all callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvlinker.context_caches import ContextCaches
from kvlinker.errors import ContextCacheModelError, ContextCacheNotFoundError, InvalidRequestError
from kvlinker.prompt.builder import PromptBuilder
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ContextCache
from kvlinker.types.chunks import Chunk
from kvlinker.types.messages import ChatMessage, CompletionPrompt, Content, ContextCacheReference, TokenIds
from kvlinker.types.texts import SearchHit

ContentPart = str | ContextCache | SearchHit | ContextCacheReference | Mapping[str, Any]
"""A text, a context cache, or one of the HTTP API's content parts."""

Message = Mapping[str, Any]
"""A message as Python callers write it: ``role``, ``content`` (a text or a list of ContentPart), perhaps ``name``."""

CompletionContent = str | TokenIds | Sequence[int | ContentPart]
"""A completion's prompt as Python callers write it: a text, token ids, or a list of texts and context caches."""


def parse_messages(
    messages: Sequence[Message | ChatMessage[ContextCacheReference]],
) -> tuple[ChatMessage[ContextCacheReference], ...]:
    """Parse a conversation; messages that are typed already stay as they are. Raises InvalidRequestError."""
    return tuple(
        message if isinstance(message, ChatMessage) else _parse_message(index, message)
        for index, message in enumerate(messages)
    )


def parse_prompt(prompt: CompletionContent) -> CompletionPrompt[ContextCacheReference]:
    """Parse the prompt of a completion. Raises InvalidRequestError."""
    if isinstance(prompt, TokenIds):
        return prompt
    if isinstance(prompt, str):
        return (prompt,)
    token_ids = tuple(part for part in prompt if isinstance(part, int))
    if len(token_ids) == len(prompt):
        return TokenIds(token_ids)
    if token_ids:
        raise InvalidRequestError("'prompt' mixes token ids with texts or context caches.", param="prompt")
    return tuple(_parse_part(part, "prompt") for part in prompt if not isinstance(part, int))


class ReadPrompt(NamedTuple):
    """A prompt, and the chunks in it by the id of the context cache that names each."""

    prompt: Prompt
    chunks: Mapping[str, Chunk]


class ContentReader:
    """Makes prompts of typed content, with the chunks of the tenant's context caches in their places.

    Each prompt takes one look at the catalog, however many context caches it has. Both methods raise
    ContextCacheNotFoundError and ContextCacheModelError with the place of the id as ``param``, and InvalidRequestError.
    """

    def __init__(self, builder: PromptBuilder, caches: ContextCaches) -> None:
        self._builder = builder
        self._caches = caches

    def chat(self, messages: Sequence[ChatMessage[ContextCacheReference]], *, tenant: str) -> ReadPrompt:
        """Read a conversation."""
        places: dict[str, str] = {}
        for index, message in enumerate(messages):
            _note_places(message.content, f"messages.{index}.content", places)
        chunks = self._look_up(places, tenant)
        linked = [ChatMessage(m.role, _with_chunks(m.content, chunks), m.name) for m in messages]
        return ReadPrompt(self._builder.chat(linked), chunks)

    def completion(self, prompt: CompletionPrompt[ContextCacheReference], *, tenant: str) -> ReadPrompt:
        """Read the prompt of a completion."""
        if isinstance(prompt, TokenIds):
            return ReadPrompt(self._builder.completion(prompt.ids), {})
        places: dict[str, str] = {}
        _note_places(prompt, "prompt", places)
        chunks = self._look_up(places, tenant)
        return ReadPrompt(self._builder.completion(_with_chunks(prompt, chunks)), chunks)

    def _look_up(self, places: Mapping[str, str], tenant: str) -> dict[str, Chunk]:
        """The chunks by id; ``places`` tells where each id stands first."""
        try:
            return self._caches.chunks(places, tenant=tenant) if places else {}
        except (ContextCacheNotFoundError, ContextCacheModelError) as error:
            error.param = places[error.cache_id]
            raise


def _note_places(content: Content[ContextCacheReference], path: str, places: dict[str, str]) -> None:
    """Add the path of each id that is not in ``places`` yet, such as ``messages.0.content.1.id``."""
    for index, part in enumerate(content):
        if isinstance(part, ContextCacheReference):
            places.setdefault(part.id, f"{path}.{index}.id")


def _with_chunks(content: Content[ContextCacheReference], chunks: Mapping[str, Chunk]) -> Content[Chunk]:
    return tuple(chunks[part.id] if isinstance(part, ContextCacheReference) else part for part in content)


def _parse_message(index: int, message: Message) -> ChatMessage[ContextCacheReference]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(
            f"The role of message {index} is {role!r}, but must be a text such as 'user'.", param="messages"
        )
    content = message.get("content") or ()
    parts: Any = (content,) if isinstance(content, str) else content
    if not isinstance(parts, Sequence):
        raise InvalidRequestError(
            f"The content of message {index} is {content!r}, but must be a text or a list of texts and context caches.",
            param="messages",
        )
    return ChatMessage(role, tuple(_parse_part(part, "messages") for part in parts), message.get("name"))


def _parse_part(part: ContentPart, param: str) -> str | ContextCacheReference:
    match part:
        case str() | ContextCacheReference():
            return part
        case ContextCache() | SearchHit():
            return ContextCacheReference(part.id)
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "context_cache", "id": str(cache_id)}:
            return ContextCacheReference(cache_id)
        case {"type": "text" | "context_cache" as kind}:
            field = "text" if kind == "text" else "id"
            raise InvalidRequestError(
                f"A content part of type {kind!r} needs {field!r}, a text: {part!r}.", param=param
            )
        case Mapping():
            raise InvalidRequestError(
                f"Content part of type {part.get('type')!r}: only 'text' and 'context_cache' are supported.",
                param=param,
            )
    raise InvalidRequestError(
        f"A content part is {part!r}, but must be a text, a context cache, or a part with a 'type'.", param=param
    )
