"""Prompts in requests: content parts, messages and documents of conversations, and prompts that
are none, in all forms that OpenAI's completions take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MAX_CHOICES, MOST_CALLS, MOST_PARTS
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    CompletionPrompt,
    Content,
    ContextCacheReference,
    Document,
    MarkedText,
    TextSource,
    TokenIds,
)
from kvlinker.doors.http.fields.bodies import LeftOut, MarkableBody, RequestBody, Text, other_than
from kvlinker.doors.http.fields.foreign import MEDIA, NO_MEDIA, Place
from kvlinker.doors.http.fields.tools import ToolCallBody
from kvlinker.prompting.marks import ttl_seconds


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


def show_part(part: Part) -> TextPart | ContextCachePart | None:
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
        for part in map(show_part, parts)
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


class MessageBody(RequestBody):
    """One turn of a conversation; only an assistant's may have no content. The assistant's
    ``reasoning_content``, or ``reasoning``, is shown by chat templates that know it; fields that
    are not known here are shown by none. A message of role ``tool`` is the result of the call
    ``tool_call_id``."""

    model_config = ConfigDict(extra="ignore")

    place: ClassVar[Place | None] = Place.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: list[ToolCallBody] | None = Field(default=None, max_length=MOST_CALLS)
    tool_call_id: Text | None = None

    def check(self) -> None:
        """Refuse a message without content that needs some, fields of another role, and a result
        without the id of its call."""
        kind: str | PydanticCustomError
        if self.content is None and self.role != "assistant":
            kind = "missing"
            if "content" in self.model_fields_set:
                kind = PydanticCustomError(
                    "content_type", "Input should be text or a list of parts"
                )
            raise self._refusal("content", None, kind)
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if (value := getattr(self, name)) and self.role != role:
                kind = PydanticCustomError("unsupported_parameter", "not supported; leave it out")
                raise self._refusal(name, value, kind)
        if self.role == "tool" and not self.tool_call_id:
            raise self._refusal("tool_call_id", None, "missing")

    def message(self) -> ChatMessage[CachedPart]:
        """Return the message as the library takes it. ``developer`` becomes ``system``, since few
        chat templates know that newer role."""
        content = (
            (self.content,) if isinstance(self.content, str) else content_of(self.content or ())
        )
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, content, self.name, self._template_fields())

    def _template_fields(self) -> Mapping[str, Any]:
        """Return the other fields of the message that chat templates may show."""
        fields: dict[str, Any] = {}
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if self.role == "assistant" and thoughts is not None:
            fields |= dict.fromkeys(("reasoning_content", "reasoning"), thoughts)
        if self.tool_calls:
            fields["tool_calls"] = [call.template_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return fields


_Tokens = Annotated[list[int], Field(min_length=1)]


def prompt_kind(value: Any) -> str | None:
    """Return the tag of the form that a prompt, or another input of texts and tokens, has; None for
    none."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "<texts>"
    if isinstance(first, list):
        return "<token lists>"
    return "<parts>" if isinstance(first, dict | BaseModel) else "<tokens>"


PromptBody = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES), Tag("<texts>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_CHOICES), Tag("<token lists>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS), Tag("<parts>")],
    Discriminator(
        prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, token ids, a list of these, or a list of parts",
    ),
]


def prompts_of(body: PromptBody) -> list[CompletionPrompt[CachedPart]]:
    """Return the prompts as the library takes them: one, unless it is a list of texts or a list of
    lists of token ids."""
    if isinstance(body, str):
        return [(body,)]
    if has_several(body):
        return [
            (one,) if isinstance(one, str) else TokenIds(tuple(cast(list[int], one)))
            for one in body
        ]
    if isinstance(body[0], int):
        return [TokenIds(tuple(body))]
    return [content_of(cast(list[Part], body))]


def has_several(body: PromptBody) -> bool:
    """Return whether the body is a list of prompts, which may hold only one."""
    return isinstance(body, list) and isinstance(body[0], str | list)


def single_prompt(body: PromptBody) -> CompletionPrompt[CachedPart]:
    """Return the prompt of a body that takes only one. Raises InvalidRequestError for several."""
    if has_several(body) and len(body) > 1:
        raise InvalidRequestError("'prompt' must be one prompt here.", param="prompt")
    return prompts_of(body)[0]
