"""Puts tools and documents into messages, for chat templates that have no places of their own for
them.

Calls are written as Hermes's models do, which many others know, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import ChatMessage, Document
from kvlinker.base.types.tools import Tool, function_of

_INTRODUCTION = (
    "# Tools\n\nThese functions can be called. "
    "Each line describes one, with a JSON schema of its arguments:\n"
)
_INSTRUCTIONS = (
    "\nTo call one, write its name and its arguments as JSON between these tags, and then wait for"
    ' the result:\n<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
)

_GAP = "\n\n"
"""Stands after every document."""

_Text = TypeVar("_Text")
"""The type of a document's text."""

Message = ChatMessage[Chunk]


def needs_tool_section(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Return whether a conversation has tools, calls or results."""
    return bool(tools) or any(
        message.role == "tool" or "tool_calls" in message.fields for message in messages
    )


def with_tool_section(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with tools described in the system message or, where there is none,
    before the text of the first one of the user's; with calls as text of the assistant's, and
    results as messages of the user's.

    Raises InvalidRequestError (``tools``) where there is neither.
    """
    shown = list(_as_text(messages))
    if not tools:
        return shown
    section = _section(tools)
    roles = [message.role for message in shown]
    if "system" in roles:
        place = roles.index("system")
        content = (*shown[place].content, f"\n\n{section}")
    elif "user" in roles:
        place = roles.index("user")
        content = (f"{section}\n\n", *shown[place].content)
    else:
        raise InvalidRequestError(
            "'tools' need a message of role 'system' or 'user'.", param="tools"
        )
    return [*shown[:place], replace(shown[place], content=content), *shown[place + 1 :]]


def with_documents(
    messages: Sequence[Message], documents: Sequence[Document[Chunk]]
) -> list[Message]:
    """Return the messages with the documents before the text of the first one of the user's: each
    one's title in a line of its own where it has one, its text, and an empty line.

    There they stand still while a conversation grows. Raises InvalidRequestError (``documents``)
    where the user says nothing.
    """
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise InvalidRequestError(
            "'documents' need a message of role 'user': add one.", param="documents"
        )
    before = [
        part for document in documents for part in document_parts(document.title, document.text)
    ]
    message = messages[first]
    return [
        *messages[:first],
        replace(message, content=(*before, *message.content)),
        *messages[first + 1 :],
    ]


def document_parts(title: str, text: _Text) -> Iterator[str | _Text]:
    """Yield the parts of a document in a message: its title in a line of its own unless it is
    empty, its text, and an empty line."""
    if title:
        yield f"{title}\n"
    yield text
    yield _GAP


def _section(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(dict(function_of(tool)), ensure_ascii=False) for tool in tools)
    return _INTRODUCTION + lines + _INSTRUCTIONS


def _as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages without fields for tools; results that follow one another share a
    message."""
    for is_result, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_result:
            results = [
                ("<tool_response>\n", *message.content, "\n</tool_response>") for message in group
            ]
            parts = [
                part
                for index, result in enumerate(results)
                for part in (*(["\n"] if index else []), *result)
            ]
            yield ChatMessage("user", tuple(parts))
            continue
        for message in group:
            fields = dict(message.fields)
            calls = fields.pop("tool_calls", ())
            texts = [_call(call["function"]) for call in calls]
            gap = ("\n",) if texts and any(message.content) else ()
            yield replace(
                message, content=(*message.content, *gap, "\n".join(texts)), fields=fields
            )


def _call(function: Mapping[str, object]) -> str:
    called = json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    return f"<tool_call>\n{called}\n</tool_call>"
