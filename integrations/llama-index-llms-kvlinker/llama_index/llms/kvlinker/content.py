"""Chunks in the content of messages.

LlamaIndex makes prompts of text, and its messages have no block for context caches. So chunks stand
in texts as elements: ``<context_cache id="cc_…">text</context_cache>``, or without an id. Here they
become the parts that a kvlinker server takes; any other model reads them as what they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    ContentBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.llms.openai.utils import to_openai_message_dict

_ELEMENT = re.compile(
    r'<context_cache(?: id="(?P<id>[^"<>]+)")?>(?P<text>.*?)</context_cache>', re.DOTALL
)
_TAG = re.compile(r'<context_cache(?: id="[^"<>]+")?>|</context_cache>')

Part = dict[str, Any]


def element(text: str, cache_id: str | None = None) -> str:
    """Return a chunk as an element: by the id of its context cache, or to be found by its text."""
    attribute = "" if cache_id is None else f' id="{cache_id}"'
    return f"<context_cache{attribute}>{text}</context_cache>"


def context_cache(cache_id: str) -> TextBlock:
    """Return a block for a message, in whose place the chunk of a context cache stands in the
    prompt."""
    return TextBlock(text=element("", cache_id))


def has_chunks(messages: Sequence[ChatMessage]) -> bool:
    """Tell if any message has a chunk, or a block that marks one."""
    blocks = [block for message in messages for block in message.blocks]
    return any(
        isinstance(block, CachePoint | CitableBlock)
        or (isinstance(block, TextBlock) and _TAG.search(block.text))
        for block in blocks
    )


def without_chunks(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages as LlamaIndex's own classes take them: chunks as text."""
    return [
        message.model_copy(update={"blocks": _plain_blocks(message.blocks)}) for message in messages
    ]


def body_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as the server takes them: content as parts. Raises ValueError for blocks
    other than text, chunks, reasoning and calls of tools."""
    bodies = []
    for message, plain in zip(messages, without_chunks(messages), strict=True):
        body: dict[str, Any] = dict(to_openai_message_dict(plain))
        if parts := _parts(message.blocks):
            body["content"] = parts
        bodies.append(body)
    return bodies


def _plain_blocks(blocks: Sequence[ContentBlock]) -> list[ContentBlock]:
    plain: list[ContentBlock] = []
    for block in blocks:
        match block:
            case CachePoint():
                continue
            case CitableBlock():
                plain += block.content
            case TextBlock():
                plain.append(TextBlock(text=_TAG.sub("", block.text)))
            case _:
                plain.append(block)
    return plain


def _parts(blocks: Sequence[ContentBlock]) -> list[Part]:
    parts: list[Part] = []
    for block in blocks:
        match block:
            case TextBlock():
                parts += _parts_of(block.text)
            case CitableBlock():
                parts += [
                    _marked(text.text) for text in block.content if isinstance(text, TextBlock)
                ]
            case CachePoint():
                if parts and parts[-1]["type"] == "text":
                    parts[-1]["cache_control"] = block.cache_control.model_dump(
                        include={"type", "ttl"}
                    )
            case ThinkingBlock() | ToolCallBlock():
                continue
            case _:
                raise ValueError(f"A {type(block).__name__} cannot stand beside chunks: give text.")
    return [part for part in parts if part.get("text", True)]


def _parts_of(text: str) -> list[Part]:
    """Cut a text at its elements. Tags that are left, of an element that was cut itself, are left
    out."""
    parts: list[Part] = []
    end = 0
    for found in _ELEMENT.finditer(text):
        parts.append(_fresh(text[end : found.start()]))
        chunk: Part = (
            {"type": "context_cache", "id": found["id"]} if found["id"] else _marked(found["text"])
        )
        parts.append(chunk)
        end = found.end()
    return [*parts, _fresh(text[end:])]


def _fresh(text: str) -> Part:
    return {"type": "text", "text": _TAG.sub("", text)}


def _marked(text: str) -> Part:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
