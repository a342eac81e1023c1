"""Blocks of content in requests, as Anthropic's API has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from kvlinker.base.types.limits import MOST_PARTS
from kvlinker.doors.http.fields.bodies import (
    JsonObject,
    LeftOut,
    NonemptyText,
    RequestBody,
    Text,
    by_type,
    other_than,
)
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.parts import (
    CacheControl,
    ContextCachePart,
    Part,
    TextOr,
    TextPart,
)
from kvlinker.doors.http.fields.tools import FunctionName
from kvlinker.prompting.chat import document_parts


class TextBlock(TextPart):
    """A text, as Anthropic's API names it."""

    type: Literal["text"]


Texts = TextOr[Annotated[list[Part], Field(max_length=MOST_PARTS)]]
"""A text, or texts and context caches, of which there may be none."""


class ToolUseBlock(RequestBody):
    """A call of the assistant's, earlier in the conversation."""

    place: ClassVar[Place | None] = Place.TOOL_USE

    type: Literal["tool_use"]
    id: Text
    name: FunctionName
    input: JsonObject


class ToolResultBlock(RequestBody):
    """The result of a call; the prompt shows one that ``is_error`` after ``Error: ``. With
    ``cache_control``, those of its texts that have no mark of their own are chunks, too."""

    place: ClassVar[Place | None] = Place.TOOL_RESULT

    type: Literal["tool_result"]
    tool_use_id: NonemptyText
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def parts(self) -> list[Part]:
        """Return the content as parts of a chat message."""
        content = self.content or ""
        parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content
        error = [TextPart(type="text", text="Error: ")] if self.is_error else []
        return [*error, *map(self._marked, parts)]

    def _marked(self, part: Part) -> Part:
        """Return a part with the result's mark, unless it is marked itself."""
        if self.cache_control is None or not isinstance(part, TextPart) or part.marks():
            return part
        return part.model_copy(update={"cache_control": self.cache_control})


class ThinkingBlock(RequestBody):
    """The assistant's reasoning, earlier in the conversation; chat templates that know it show
    it."""

    place: ClassVar[Place | None] = Place.THINKING

    type: Literal["thinking"]
    thinking: Text


class DocumentTextBody(RequestBody):
    """Holds the text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: Text


class Citations(RequestBody):
    """Asks for citations of a document, which are not supported."""

    place: ClassVar[Place | None] = Place.CITATIONS


class DocumentBlock(RequestBody):
    """A document, whose text becomes a chunk after its title."""

    place: ClassVar[Place | None] = Place.DOCUMENT

    type: Literal["document"]
    source: DocumentTextBody
    title: Text | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None

    def parts(self) -> list[TextPart]:
        """Return the document as parts of a chat message."""
        mark = self.cache_control or CacheControl(type="ephemeral")
        marked = TextPart(type="text", text=self.source.data, cache_control=mark)
        return [
            TextPart(type="text", text=part) if isinstance(part, str) else part
            for part in document_parts(self.title or "", marked)
        ]


_TAGS = ("text", "context_cache", "tool_use", "tool_result", "thinking", "document")


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ContextCachePart, Tag("<context_cache>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[LeftOut, other_than(*_TAGS), Tag("<other>")],
    by_type(*_TAGS),
]

Blocks = TextOr[Annotated[list[Block], Field(min_length=1, max_length=MOST_PARTS)]]


def located(content: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the blocks of a content, and their paths in the request."""
    if isinstance(content, str):
        yield TextPart(type="text", text=content), path
        return
    for index, block in enumerate(content):
        yield block, f"{path}.{index}"
