"""Request bodies of /v1/messages, and their translation to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MOST_MESSAGES, MOST_PARTS, MOST_STOPS, MOST_TOOLS
from kvlinker.doors.http.answers.chat import ContextCachePart, Part, TextOr, TextPart, show_part
from kvlinker.doors.http.answers.dialects import Translation
from kvlinker.doors.http.fields.bodies import (
    CacheControl,
    JsonObject,
    LeftOut,
    MarkableBody,
    NonemptyText,
    RequestBody,
    Text,
    by_type,
    other_than,
)
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.generation import (
    CacheSalt,
    Effort,
    LinkOptions,
    ReasoningFields,
    RequestId,
    StopText,
)
from kvlinker.doors.http.fields.tools import FunctionName
from kvlinker.prompting.chat import document_parts

BILLING_LINE = "x-anthropic-billing-header:"


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
    """The result of a call. If ``is_error`` is true, the prompt shows it behind ``Error: ``. With
    ``cache_control``, its texts without a mark of their own are chunks, too."""

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
    """A document, whose text becomes a chunk after its title, with ``cache_control`` or without,
    which only gives it a lifetime."""

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


def locate_blocks(content: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the blocks of a content, and their paths in the request."""
    if isinstance(content, str):
        yield TextPart(type="text", text=content), path
        return
    for index, block in enumerate(content):
        yield block, f"{path}.{index}"


class MessageParam(RequestBody):
    """One turn of a conversation. Turns of the same role that follow one another are read as
    one."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def check(self) -> None:
        for block in () if isinstance(self.content, str) else self.content:
            role = {
                ToolUseBlock: "assistant",
                ThinkingBlock: "assistant",
                ToolResultBlock: "user",
            }.get(type(block))
            if role not in (None, self.role):
                raise InvalidRequestError(
                    f"A block of type {block.type!r} belongs in messages of role {role!r}, not"
                    f" {self.role!r}.",
                    param="messages",
                )


class MessageTool(MarkableBody):
    """A function that the model may call; ``input_schema`` is a JSON schema. With ``strict``,
    arguments are enforced to be valid whenever it is called. With ``cache_control``, its definition
    is a chunk where the prompt shows it."""

    place: ClassVar[Place | None] = Place.MESSAGES_TOOL

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def chat_tool(self) -> dict[str, Any]:
        """Return the definition as chat requests have it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
        }
        return {"type": "function", "function": {**function, "strict": self.strict}, **self.marks()}


MessageTools = Annotated[
    list[
        Annotated[
            Annotated[MessageTool, Tag("<custom>")]
            | Annotated[LeftOut, other_than("custom"), Tag("<other>")],
            by_type("custom", untyped="custom"),
        ]
    ],
    Field(max_length=MOST_TOOLS),
]
"""Functions, and tools that Anthropic's servers or clients define by their type, which are left
out."""


class AnyToolChoice(RequestBody):
    """The choice of calls: ``auto`` lets the model choose, ``any`` asks for a call, and ``none``
    forbids calls."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(RequestBody):
    """The tool that is to be called."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


_ToolChoice = Annotated[
    Annotated[AnyToolChoice, Tag("<any>")] | Annotated[NamedToolChoice, Tag("<named>")],
    Discriminator(
        lambda value: (
            "<named>" if isinstance(value, dict) and value.get("type") == "tool" else "<any>"
        )
    ),
]


class OutputFormat(RequestBody):
    """The JSON schema that the answer must be valid under."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestBody):
    """The form of the answer, and the effort of the model's reasoning."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ReasoningFields):
    """A conversation whose tokens are to be counted."""

    place: ClassVar[Place | None] = Place.COUNT_TOKENS
    model: Text | None = None
    messages: list[MessageParam] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Texts | None = None
    tools: MessageTools | None = None
    tool_choice: _ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="An older name of `output_config.format`."
    )
    cache_control: CacheControl | None = Field(
        default=None,
        description="Means nothing: what begins as an earlier prompt did is reused in any case.",
    )
    link: LinkOptions | None = None
    cache_salt: CacheSalt | None = None

    def translated(self) -> Translation:
        """Return the chat request."""
        made = Translation(
            fields={
                "response_format.json_schema": "output_format"
                if self.output_format
                else "output_config.format",
                "stop": "stop_sequences",
            },
        )
        names = (*ReasoningFields.model_fields, "model", "link", "cache_salt")
        made.values |= {name: getattr(self, name) for name in names}
        if self.system:
            made.add_message("system")
            for part, origin in locate_blocks(self.system, "system"):
                if not _is_billing(part):
                    made.add_part(part, origin=origin)
        for index, message in enumerate(self.messages):
            _translate(message, made, f"messages.{index}")
        made.values["continue_final_message"] = bool(made.values["messages"]) and (
            made.last["role"] == "assistant" and "tool_calls" not in made.last
        )
        functions = [tool for tool in self.tools or () if isinstance(tool, MessageTool)]
        if functions:
            made.values["tools"] = [tool.chat_tool() for tool in functions]
        choice = self.tool_choice
        if choice is not None and (functions or not self.tools or choice.type != "auto"):
            made.values["tool_choice"] = _chat_choice(choice)
            made.values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.effort is not None:
            made.values["reasoning_effort"] = self.output_config.effort
            made.fields["reasoning_effort"] = "output_config.effort"
        form = self.output_format or (self.output_config and self.output_config.format)
        if form:
            schema = {"schema": form.schema_}
            made.values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return made


class MessagesRequest(CountTokensRequest):
    """A conversation to answer. Fields that would change the answer and are not supported are
    refused."""

    place: ClassVar[Place | None] = Place.MESSAGES
    request_id: RequestId | None = None
    max_tokens: int = Field(ge=1, le=2**31 - 1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    stop_sequences: list[StopText] | None = Field(default=None, max_length=MOST_STOPS)
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def translated(self) -> Translation:
        made = super().translated()
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        made.values |= {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}
        return made


def _translate(message: MessageParam, made: Translation, path: str) -> None:
    """Add a message to the chat request: one, or several where results of calls are in it."""
    for block, origin in locate_blocks(message.content, f"{path}.content"):
        if isinstance(block, ToolResultBlock):
            made.add_result(block.tool_use_id, origin=f"{origin}.tool_use_id")
            for part in block.parts():
                made.add_part(part, origin=f"{origin}.content")
            continue
        if isinstance(block, LeftOut) and show_part(block) is None:
            continue
        _begin_turn(message.role, made)
        match block:
            case ToolUseBlock():
                made.add_call(
                    block.id, block.name, json.dumps(block.input, ensure_ascii=False), origin=origin
                )
            case ThinkingBlock():
                made.add_reasoning(block.thinking)
            case DocumentBlock():
                for part in block.parts():
                    made.add_part(part, origin=origin)
            case _:
                made.add_part(block, origin=origin)


def _is_billing(part: Any) -> bool:
    """Return whether a part of the system prompt is the line by which Claude Code accounts for its
    requests: it changes at each one, and whatever stands behind it would be new."""
    return isinstance(part, TextPart) and part.text.startswith(BILLING_LINE)


def _begin_turn(role: str, made: Translation) -> None:
    """Begin a message, unless the last one is of the same role; those of the system are never
    one."""
    if not made.values["messages"] or not (made.last["role"] == role != "system"):
        made.add_message(role)


def _chat_choice(choice: AnyToolChoice | NamedToolChoice) -> Any:
    """Return a choice of tools as chat requests have it."""
    if isinstance(choice, NamedToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
