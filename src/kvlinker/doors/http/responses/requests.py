"""The request body of /v1/responses with its items, and its translation to a chat request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from kvlinker.base.types.limits import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from kvlinker.base.types.messages import MARKS
from kvlinker.doors.http.answers.chat import TextOr, TextOrParts
from kvlinker.doors.http.answers.dialects import Translation
from kvlinker.doors.http.fields.bodies import (
    OR_LEFT_OUT,
    JsonObject,
    LeftOut,
    MarkableBody,
    Metadata,
    NonemptyText,
    RequestBody,
    Text,
    by_type,
    other_than,
)
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.generation import (
    CacheSalt,
    DecodingFields,
    LinkOptions,
    ReasoningBody,
    ReasoningFields,
    RequestId,
    ServiceTier,
    StreamOptions,
    Verbosity,
)
from kvlinker.doors.http.fields.tools import (
    FunctionName,
    allowed_tools,
    choice_kind,
)


class MessageItem(RequestBody):
    """One turn of a conversation."""

    place: ClassVar[Place | None] = Place.MESSAGE_ITEM

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrParts


class FunctionCallItem(RequestBody):
    """A call of the assistant's, earlier in the conversation."""

    place: ClassVar[Place | None] = Place.CALL_ITEM

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: Text


class FunctionCallOutputItem(RequestBody):
    """The result of a call."""

    place: ClassVar[Place | None] = Place.RESULT_ITEM

    type: Literal["function_call_output"]
    call_id: NonemptyText
    output: TextOrParts


class ReasoningText(RequestBody):
    """Holds a piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(RequestBody):
    """The assistant's reasoning, earlier in the conversation; chat templates that know it show
    it."""

    place: ClassVar[Place | None] = Place.REASONING_ITEM

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(default=None, max_length=MOST_PARTS)


class CustomCallItem(RequestBody):
    """A call of a tool that takes a text, earlier in the conversation."""

    place: ClassVar[Place | None] = Place.CALL_ITEM

    type: Literal["custom_tool_call"]
    call_id: Text
    name: FunctionName
    input: Text


class CustomCallOutputItem(FunctionCallOutputItem):
    """The result of a call of a tool that takes a text."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ItemReference(RequestBody):
    """Stands for an item of a kept answer, by its id."""

    type: Literal["item_reference"]
    id: NonemptyText


_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[LeftOut, other_than(*_KINDS), Tag("<other>")],
    by_type(*_KINDS, untyped="message"),
]


def add_items(items: Sequence[Item], made: Translation, *, origin_of: Callable[[int], str]) -> None:
    """Add the messages that items stand for to a chat request: reasoning, text and calls of the
    assistant's that follow one another are one message. ``origin_of`` gives the path that an item
    comes from, by its index."""
    for index, item in enumerate(items):
        origin = origin_of(index)
        match item:
            case ReasoningItem():
                _begin_turn(made)
                made.add_reasoning("".join(part.text for part in item.content or ()))
            case FunctionCallItem():
                if not _speaks(made):
                    made.add_message("assistant")
                made.add_call(item.call_id, item.name, item.arguments, origin=origin)
            case CustomCallItem():
                if not _speaks(made):
                    made.add_message("assistant")
                arguments = json.dumps({"input": item.input}, ensure_ascii=False)
                made.add_call(item.call_id, item.name, arguments, origin=origin)
            case FunctionCallOutputItem():
                made.add_result(item.call_id, origin=f"{origin}.call_id")
                made.add_content(item.output, origin=f"{origin}.output")
            case MessageItem(role="assistant"):
                _begin_turn(made)
                made.add_content(item.content, origin=f"{origin}.content")
            case MessageItem():
                made.add_message(item.role)
                made.add_content(item.content, origin=f"{origin}.content")


def _begin_turn(made: Translation) -> None:
    """Begin a message of the assistant's, unless the last one has reasoning alone."""
    if not _speaks(made) or made.last["content"] or "tool_calls" in made.last:
        made.add_message("assistant")


def _speaks(made: Translation) -> bool:
    """Return whether the assistant has spoken last."""
    return bool(made.values["messages"]) and made.last["role"] == "assistant"


class ResponseTool(MarkableBody):
    """A function that the model may call; ``parameters`` is a JSON schema. With ``strict``,
    arguments are enforced to be valid whenever it is called. With one of the marks, its definition
    is a chunk where the prompt shows it."""

    place: ClassVar[Place | None] = Place.RESPONSES_TOOL

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


FunctionOrOther = Annotated[
    Annotated[ResponseTool, Tag("<function>")]
    | Annotated[LeftOut, other_than("function"), Tag("<other>")],
    by_type("function"),
]


class NamespaceTool(RequestBody):
    """Functions under a common name, which calls of them repeat. Other tools in it are left out."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: list[FunctionOrOther] = Field(max_length=MOST_TOOLS)


class NamedFunction(RequestBody):
    """The function that is to be called."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(RequestBody):
    """The functions of which one may be called, or must with the mode ``required``."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedFunction] = Field(min_length=1, max_length=MOST_TOOLS)


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<function>")]
    | Annotated[AllowedFunctions, Tag("<allowed_tools>")]
    | Annotated[LeftOut, other_than("function", "allowed_tools"), Tag("<other>")],
    Discriminator(choice_kind),
]

_Tool = Annotated[
    Annotated[ResponseTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[LeftOut, other_than("function", "namespace"), Tag("<other>")],
    by_type("function", "namespace"),
]
"""A function, functions of a namespace, or a tool that other servers run, which is left out."""


class TextFormat(RequestBody):
    """Any text, or a JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestBody):
    """JSON that is valid under a schema, with and without ``strict``."""

    type: Literal["json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


_Format = Annotated[
    Annotated[TextFormat, Tag("<text>")] | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        lambda value: (
            "<json_schema>"
            if isinstance(value, dict) and value.get("type") == "json_schema"
            else "<text>"
        )
    ),
]


class TextBody(RequestBody):
    """The form of the answer, and its length."""

    verbosity: Verbosity | None = None
    format: _Format | None = None


Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"], OR_LEFT_OUT
]
"""The additional fields of an answer: only the first exists in kvlinker's answers."""


class ResponsesRequest(ReasoningFields, DecodingFields):
    """A conversation to answer: all of it, or its continuation after ``previous_response_id``,
    whose instructions do not count any more. With ``store`` false, nothing of it is kept."""

    place: ClassVar[Place | None] = Place.RESPONSES

    model: Text | None = None
    input: TextOr[Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES)]]
    previous_response_id: NonemptyText | None = None
    instructions: Text | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    tools: list[_Tool] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    include: list[Included] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    link: LinkOptions | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None

    @property
    def tells_logprobs(self) -> bool:
        """True if the answer is to have the log probabilities of its text's tokens."""
        return "message.output_text.logprobs" in (self.include or ())

    def sampling_settings(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that answers repeat, as far as they are given."""
        return {
            name: value
            for name in ("temperature", "top_p")
            if (value := getattr(self, name)) is not None
        }

    def text_settings(self) -> dict[str, Any]:
        """Return the form of the answer, as answers repeat it."""
        asked = self.text.format if self.text else None
        return {
            "format": {"type": "text"}
            if asked is None
            else asked.model_dump(by_alias=True, exclude_none=True)
        }

    def reasoning_settings(self) -> dict[str, str | None]:
        """Return the request's options for reasoning, as answers repeat them."""
        asked = self.reasoning or ReasoningBody()
        return {"effort": asked.effort, "summary": asked.summary}

    def tool_choice_settings(self) -> str | dict[str, str]:
        """Return the choice of tools, as answers repeat it."""
        if isinstance(self.tool_choice, RequestBody):
            return self.tool_choice.model_dump()
        return self.tool_choice if isinstance(self.tool_choice, str) else "auto"

    def functions(self) -> dict[str, tuple[ResponseTool, str | None]]:
        """Return the functions that may be called, by name, each with its namespace. Of several
        that share a name, the first counts."""
        found: dict[str, tuple[ResponseTool, str | None]] = {}
        for tool in self.tools or ():
            inner = tool.tools if isinstance(tool, NamespaceTool) else [tool]
            space = tool.name if isinstance(tool, NamespaceTool) else None
            for each in inner:
                if isinstance(each, ResponseTool):
                    found.setdefault(each.name, (each, space))
        return found

    def own_items(self) -> Sequence[Item]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    def translated(self, earlier: Sequence[Item], items: Sequence[Item]) -> Translation:
        """Return the chat request. The items of the conversation that it goes on from are
        ``earlier``, those of the input, with kept ones in place of references, are ``items``."""
        made = Translation(
            fields={
                "messages": "input",
                "max_tokens": "max_output_tokens",
                "response_format": "text.format",
                "response_format.json_schema": "text.format",
            }
        )
        names = (
            *DecodingFields.model_fields,
            *ReasoningFields.model_fields,
            "model",
            "link",
            "parallel_tool_calls",
            "stream",
            "service_tier",
            "cache_salt",
        )
        made.values |= {name: getattr(self, name) for name in names} | {
            "max_tokens": self.max_output_tokens
        }
        if self.tells_logprobs:
            made.values |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text and self.text.verbosity:
            made.values["verbosity"] = self.text.verbosity
            made.fields["verbosity"] = "text.verbosity"
        if self.instructions is not None:
            made.add_message("system")
            made.add_content(self.instructions, origin="instructions")
        add_items(earlier, made, origin_of=lambda _: "previous_response_id")
        add_items(items, made, origin_of="input.{}".format)
        functions = self.functions()
        made.values["tools"] = [
            {
                "type": "function",
                "function": tool.model_dump(exclude={"type", *MARKS}),
                **tool.marks(),
            }
            for tool, _ in functions.values()
        ]
        match self.tool_choice:
            case NamedFunction(name=name):
                made.values["tool_choice"] = {"type": "function", "function": {"name": name}}
            case AllowedFunctions(mode=mode, tools=allowed):
                made.values["tool_choice"] = allowed_tools(mode, [each.name for each in allowed])
            case str() as word if functions or word != "auto":  # which answers have without tools
                made.values["tool_choice"] = word
        match self.text.format if self.text else None:
            case TextFormat(type=kind):
                made.values["response_format"] = {"type": kind}
            case JsonSchemaFormat() as form:
                schema = form.model_dump(by_alias=True, exclude={"type"})
                made.values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return made
