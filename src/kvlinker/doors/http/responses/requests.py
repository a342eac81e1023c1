"""The request body of /v1/responses, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from kvlinker.base.types.limits import MOST_MESSAGES, MOST_TOOLS
from kvlinker.base.types.messages import MARKS
from kvlinker.doors.http.answers.dialects import Translation
from kvlinker.doors.http.fields.bodies import (
    OR_LEFT_OUT,
    JsonObject,
    LeftOut,
    Metadata,
    NonemptyText,
    RequestBody,
    Text,
    by_type,
    has_entries,
    other_than,
    where,
)
from kvlinker.doors.http.fields.decoding import DecodingFields
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.parts import MarkableBody, TextOr
from kvlinker.doors.http.fields.reasoning import ReasoningBody, ReasoningFields, Verbosity
from kvlinker.doors.http.fields.sampling import (
    NOTHING_EXPLAINED,
    CacheSalt,
    LinkOptions,
    RequestId,
    ServiceTier,
    StreamOptions,
)
from kvlinker.doors.http.fields.tools import (
    CALLS,
    FunctionName,
    allowed_tools,
    choice_kind,
    of_type,
)
from kvlinker.doors.http.responses.items import Item, MessageItem, add_items


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
    """Functions under a common name, which calls of them repeat; other tools in it are left out."""

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
    """The form of the answer, and how long it is to be."""

    verbosity: Verbosity | None = None
    format: _Format | None = None


Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"], OR_LEFT_OUT
]
"""The additional fields of an answer: only the first exists in kvlinker's answers."""


class ResponsesRequest(ReasoningFields, DecodingFields):
    """A conversation to answer: all of it, or what follows on ``previous_response_id``, whose
    instructions do not count any more. With ``store`` false, nothing of it is kept."""

    place: ClassVar[Place | None] = Place.RESPONSES

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        where({"tool_choice": CALLS}, has_entries("tools", of_type("function"))),
        NOTHING_EXPLAINED,
    )

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

    def told_sampling(self) -> dict[str, Any]:
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
