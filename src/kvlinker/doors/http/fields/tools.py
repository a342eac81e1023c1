"""Tools in requests and answers, as OpenAI's API has them: definitions, choices and calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import AnswerPiece
from kvlinker.base.types.limits import LONGEST_ARGUMENTS, MOST_TOOLS
from kvlinker.base.types.tools import Tool, ToolCall, parsed_arguments, shown_tool, template_call
from kvlinker.doors.http.fields.bodies import (
    JsonObject,
    LeftOut,
    MarkableBody,
    RequestBody,
    ResponseBody,
    Text,
    Unicode,
    by_type,
    other_than,
)
from kvlinker.doors.http.fields.foreign import Place

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class FunctionBody(RequestBody):
    """A function that the model may call; ``parameters`` is a JSON schema. With ``strict``,
    arguments are enforced to be valid whenever it is called."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(MarkableBody):
    """A tool that the model may use. With one of the marks, its definition is a chunk where the
    prompt shows it."""

    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        """Return the tool as the library takes it."""
        return {
            "type": self.type,
            "function": self.function.model_dump(exclude_none=True),
            **self.marks(),
        }


def template_tools(tools: Sequence[ToolBody] | None) -> tuple[Tool, ...]:
    """Return definitions as prompts are made of them."""
    return tuple(shown_tool(tool.tool()) for tool in tools or ())


ToolOrOther = Annotated[
    Annotated[ToolBody, Tag("<function>")]
    | Annotated[LeftOut, other_than("function"), Tag("<other>")],
    by_type("function", untyped="function"),
]
"""A function, or a tool that other servers run, which is left out."""


class NamedFunctionBody(RequestBody):
    """The function that is to be called."""

    name: FunctionName


class NamedToolBody(RequestBody):
    """The tool that is to be used."""

    type: Literal["function"]
    function: NamedFunctionBody


class AllowedBody(RequestBody):
    """The tools of which one may be used, or must with the mode ``required``."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedToolBody] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedToolsBody(RequestBody):
    """Narrows the choice of tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedBody

    def offered(self, tools: Sequence[ToolBody]) -> list[ToolBody]:
        """Return those of the ``tools`` that may be used. Raises InvalidRequestError for others."""
        names = [each.function.name for each in self.allowed_tools.tools]
        if unknown := set(names) - {tool.function.name for tool in tools}:
            raise InvalidRequestError(
                f"{min(unknown)!r} is allowed, but is not among 'tools'.", param="tool_choice"
            )
        return [tool for tool in tools if tool.function.name in names]


def choice_kind(value: Any) -> str:
    """Return the tag of a choice of tools; choices of other servers' tools are left out."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = ("function", "allowed_tools")
    return f"<{kind}>" if kind in known or not isinstance(kind, str) else "<other>"


ToolChoiceBody = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedToolBody, Tag("<function>")]
    | Annotated[AllowedToolsBody, Tag("<allowed_tools>")]
    | Annotated[LeftOut, other_than("function", "allowed_tools"), Tag("<other>")],
    Discriminator(choice_kind),
]


def allowed_tools(mode: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the choice of tools with these names as chat requests have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _check_arguments(text: str) -> str:
    try:
        parsed_arguments(text)
    except ValueError:
        raise PydanticCustomError("json_object", "Input should be a JSON object, as text") from None
    return text


class CalledFunctionBody(RequestBody):
    """A function that was called, with its arguments as JSON. Where the call was cut, they are the
    beginning of that."""

    name: FunctionName
    arguments: Annotated[
        str,
        StringConstraints(max_length=LONGEST_ARGUMENTS),
        Unicode,
        AfterValidator(_check_arguments),
    ]


class ToolCallBody(RequestBody):
    """A call of the assistant's, earlier in the conversation."""

    place: ClassVar[Place | None] = Place.CALL

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunctionBody

    def template_call(self) -> dict[str, Any]:
        """Return the call as chat templates take it, with its arguments as an object."""
        return template_call(self.model_dump())


class FunctionCall(ResponseBody):
    """The function that the model calls; ``arguments`` is a JSON object, as text. Where the answer
    was cut, it is the beginning of one."""

    name: str
    arguments: str


class ToolCallObject(ResponseBody):
    """A call that the model asks for. The client sends its result in a message of role ``tool``
    with its id."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(ResponseBody):
    """The name of a function where its call begins, and more of the arguments."""

    name: str = ""
    arguments: str


class ToolCallDelta(ResponseBody):
    """A piece of a call in a stream; ``index`` counts the calls of a choice. The first one of a
    call has its id, type and name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCallDelta


def call_objects(calls: Sequence[ToolCall]) -> list[ToolCallObject]:
    """Return calls in the format of answers."""
    return [
        ToolCallObject(
            id=call.id,
            type="function",
            function=FunctionCall(name=call.name, arguments=call.arguments),
        )
        for call in calls
    ]


class CallDeltas:
    """Formats the calls of one choice for streams, piece by piece, and numbers them."""

    def __init__(self) -> None:
        self.complete = False
        """True if there are calls, and the last one is complete."""

        self._count = 0

    def of(self, pieces: Iterable[AnswerPiece]) -> list[ToolCallDelta]:
        """Return the calls in new pieces of the answer: one delta for each call."""
        heads: dict[int, AnswerPiece] = {}
        arguments: dict[int, str] = {}
        for piece in pieces:
            match piece.kind:
                case "call":
                    self._count += 1
                    self.complete = False
                    heads[self._count - 1] = piece
                    arguments[self._count - 1] = ""
                case "arguments":
                    index = self._count - 1
                    arguments[index] = arguments.get(index, "") + piece.text
                case "called":
                    self.complete = True
        return [_call_delta(index, heads.get(index), text) for index, text in arguments.items()]


def _call_delta(index: int, head: AnswerPiece | None, arguments: str) -> ToolCallDelta:
    """Return a piece of a call; ``head`` is where it begins."""
    if head is None:
        return ToolCallDelta(index=index, function=FunctionCallDelta(arguments=arguments))
    function = FunctionCallDelta(name=head.text, arguments=arguments)
    return ToolCallDelta(index=index, id=head.call_id, type="function", function=function)
