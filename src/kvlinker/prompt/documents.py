"""Puts documents into messages, for chat templates that have no place of their own for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvlinker.errors import InvalidRequestError
from kvlinker.types.chunks import Chunk
from kvlinker.types.messages import ChatMessage, Document

GAP = "\n\n"
"""Stands behind every document."""


def with_documents(
    messages: Sequence[ChatMessage[Chunk]], documents: Sequence[Document[Chunk]]
) -> list[ChatMessage[Chunk]]:
    """Return the messages with the documents before the text of the first one of the user's: each one's title in a line
    of its own where it has one, its text, and an empty line.

    There they stand still while a conversation grows. Raises InvalidRequestError (``documents``) where the user says
    nothing.
    """
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise InvalidRequestError("'documents' stand in a message of role 'user': add one.", param="documents")
    before: list[str | Chunk] = []
    for document in documents:
        if document.title:
            before.append(f"{document.title}\n")
        before += [document.text, GAP]
    message = messages[first]
    return [*messages[:first], replace(message, content=(*before, *message.content)), *messages[first + 1 :]]
