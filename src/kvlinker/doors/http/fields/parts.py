"""Content parts of requests: texts, marked texts, references to context caches, documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from kvlinker.base.types.limits import MOST_PARTS
from kvlinker.base.types.messages import (
    MARKS,
    CachedPart,
    Content,
    ContextCacheReference,
    Document,
    MarkedText,
    TextSource,
)
from kvlinker.doors.http.fields.bodies import LeftOut, RequestBody, Text, other_than
from kvlinker.doors.http.fields.foreign import MEDIA, NO_MEDIA, Place
from kvlinker.prompting.marks import ttl_seconds


def _check_ttl(text: str) -> str:
    try:
        ttl_seconds(text)
    except ValueError as error:
        raise PydanticCustomError(
            "ttl_format", "Input is wrong: {reason}", {"reason": str(error)}
        ) from error
    return text


_UP_TO_A_DAY = (
    r"^(([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2}|86400)s"
    r"|([1-9][0-9]{0,2}|1[0-3][0-9]{2}|14[0-3][0-9]|1440)m"
    r"|([1-9]|1[0-9]|2[0-4])h)$"
)
"""Matches the texts that ``ttl_seconds`` takes."""

MarkTtl = Annotated[
    Text, AfterValidator(_check_ttl), WithJsonSchema({"type": "string", "pattern": _UP_TO_A_DAY})
]


class CacheControl(RequestBody):
    """Marks a text part as a chunk, in Anthropic's form; ``ttl`` is how long it lives from its last
    use: "5m", "1h"."""

    type: Literal["ephemeral"]
    ttl: MarkTtl | None = None


class PromptCacheBreakpoint(RequestBody):
    """Marks a text part as a chunk, in OpenAI's form."""

    mode: Literal["explicit"]


class MarkableBody(RequestBody):
    """Base of parts that may be marked as chunks."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    def marks(self) -> dict[str, Any]:
        """Return the marks that are given, by field."""
        return self.model_dump(include=set(MARKS), exclude_none=True)


class TextPart(MarkableBody):
    """Text, under any of the names that OpenAI's routes have for it: fresh, or a chunk that is
    found by content if one of the marks is given."""

    place: ClassVar[Place | None] = Place.TEXT_PART

    type: Literal["text", "input_text", "output_text"]
    text: Text

    def content(self) -> str | MarkedText:
        """Return the text as the library takes it."""
        if self.cache_control is None and self.prompt_cache_breakpoint is None:
            return self.text
        ttl = self.cache_control.ttl if self.cache_control else None
        return MarkedText(self.text, None if ttl is None else ttl_seconds(ttl))


class ContextCachePart(RequestBody):
    """The chunk of a context cache."""

    place: ClassVar[Place | None] = Place.CONTEXT_CACHE_PART

    type: Literal["context_cache"]
    id: Text


class RefusalPart(RequestBody):
    """The assistant's words where it refused, earlier in the conversation."""

    type: Literal["refusal"]
    refusal: Text


_PART_TAGS = {
    "text": "<text>",
    "input_text": "<text>",
    "output_text": "<text>",
    "context_cache": "<context_cache>",
    "refusal": "<refusal>",
}


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PART_TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ContextCachePart, Tag("<context_cache>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[LeftOut, other_than(*_PART_TAGS), Tag("<other>")],
    Discriminator(_part_kind),
]

_Several = TypeVar("_Several")

TextOr = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Several, Tag("<several>")],
    Discriminator(lambda value: "<several>" if isinstance(value, list) else "<text>"),
]
"""A text, or a list of something."""

TextOrParts = TextOr[Annotated[list[Part], Field(max_length=MOST_PARTS)]]
"""The content of a message: a text, or texts and context caches in any order. No parts are an empty
text: tools that find nothing have clients send them."""


def shown(part: Part) -> TextPart | ContextCachePart | None:
    """Return a part as the prompt shows it: in place of media stands a text that says so, so that a
    conversation with some goes on. None for parts of other types, which it does not show."""
    match part:
        case RefusalPart():
            return TextPart(type="text", text=part.refusal)
        case LeftOut():
            what = MEDIA.get(part.type)
            text = f"[{what} left out: {NO_MEDIA}]"
            return None if what is None else TextPart(type="text", text=text)
    return part


def content_of(parts: Sequence[Part]) -> Content[CachedPart]:
    """Return the parts of a message or a prompt as the library takes them."""
    return tuple(
        part.content() if isinstance(part, TextPart) else ContextCacheReference(part.id)
        for part in map(shown, parts)
        if part is not None
    )


class DocumentBody(RequestBody):
    """A document that the conversation is about, which becomes a chunk. Chat templates that take
    documents also get its other fields, such as ``title``."""

    model_config = ConfigDict(extra="allow")

    text: Text
    title: Text | None = None

    def document(self) -> Document[CachedPart]:
        """Return the document as the library takes it."""
        title = {} if self.title is None else {"title": self.title}
        return Document(
            MarkedText(self.text, source=TextSource.DOCUMENT), title | (self.model_extra or {})
        )
