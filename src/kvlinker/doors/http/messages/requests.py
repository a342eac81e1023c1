"""Request bodies of /v1/messages, and their translation to chat requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MOST_MESSAGES, MOST_STOPS, MOST_TOOLS
from kvlinker.doors.http.answers.dialects import Translation
from kvlinker.doors.http.fields.bodies import JsonObject, RequestBody, Text, has_entries, where
from kvlinker.doors.http.fields.decoding import StopText
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.messages import unless_role
from kvlinker.doors.http.fields.parts import CacheControl, MarkableBody
from kvlinker.doors.http.fields.reasoning import Effort, ReasoningFields
from kvlinker.doors.http.fields.sampling import (
    ATTENTION_IS_EXPLAINED,
    NOTHING_EXPLAINED,
    CacheSalt,
    LinkOptions,
    RequestId,
)
from kvlinker.doors.http.fields.tools import FunctionName
from kvlinker.doors.http.messages.blocks import (
    Blocks,
    DocumentBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    located,
)


def _without(*types: str) -> dict[str, JsonValue]:
    """Return a schema of messages that have no blocks of these types."""
    return {
        "properties": {
            "content": {"items": {"properties": {"type": {"not": {"enum": list(types)}}}}}
        }
    }


class MessageParam(RequestBody):
    """One turn of a conversation; turns of the same role that follow one another are one."""

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        unless_role("assistant", _without("tool_use", "thinking")),
        unless_role("user", _without("tool_result")),
    )

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_role(self) -> MessageParam:
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
        return self


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


class AnyToolChoice(RequestBody):
    """Whether a tool is called: if the model likes, in any case, or not at all."""

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
    """A JSON schema that the answer is to be valid under."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestBody):
    """The form of the answer, and how much the model is to reason for it."""

    effort: Effort | None = None
    format: OutputFormat | None = None


_TOOLS_ARE_THERE = where(
    {
        "tool_choice": {
            "required": ["type"],
            "properties": {"type": {"enum": ["auto", "any", "tool"]}},
            "type": "object",
        }
    },
    has_entries("tools"),
)


class CountTokensRequest(ReasoningFields):
    """A conversation whose tokens are to be counted."""

    place: ClassVar[Place | None] = Place.COUNT_TOKENS
    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        _TOOLS_ARE_THERE,
        ATTENTION_IS_EXPLAINED,
    )

    model: Text | None = None
    messages: list[MessageParam] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Texts | None = None
    tools: list[MessageTool] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: _ToolChoice | None = None
    output_config: OutputConfig | None = None
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
                "response_format.json_schema": "output_config.format",
                "stop": "stop_sequences",
            },
            cuts_max_tokens=True,
        )
        names = (*ReasoningFields.model_fields, "model", "link", "cache_salt")
        made.values |= {name: getattr(self, name) for name in names}
        if self.system:
            made.add_message("system")
            made.add_content(self.system, origin="system")
        for index, message in enumerate(self.messages):
            _translate(message, made, f"messages.{index}")
        made.values["continue_final_message"] = (
            made.last["role"] == "assistant" and "tool_calls" not in made.last
        )
        if self.tools:
            made.values["tools"] = [tool.chat_tool() for tool in self.tools]
        if self.tool_choice is not None:
            made.values["tool_choice"] = _chat_choice(self.tool_choice)
            made.values["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None:
            if self.output_config.effort is not None:
                made.values["reasoning_effort"] = self.output_config.effort
                made.fields["reasoning_effort"] = "output_config.effort"
            if self.output_config.format is not None:
                schema = {"schema": self.output_config.format.schema_}
                made.values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return made


class MessagesRequest(CountTokensRequest):
    """A conversation to answer. Fields that would change the answer and are not supported are
    refused."""

    place: ClassVar[Place | None] = Place.MESSAGES
    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (_TOOLS_ARE_THERE, NOTHING_EXPLAINED)

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
    for block, origin in located(message.content, f"{path}.content"):
        if isinstance(block, ToolResultBlock):
            made.add_result(block.tool_use_id, origin=f"{origin}.tool_use_id")
            for part in block.parts():
                made.add_part(part, origin=f"{origin}.content")
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
