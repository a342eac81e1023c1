"""Items of input, as /v1/responses takes them, and their translation to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from kvlinker.base.types.limits import MOST_PARTS
from kvlinker.doors.http.answers.dialects import Translation
from kvlinker.doors.http.fields.bodies import NonemptyText, RequestBody, Text
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.parts import TextOrParts
from kvlinker.doors.http.fields.tools import FunctionName


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


class UnknownItem(BaseModel):
    """The catch-all for items of other types, which are all invalid: its error lists the types that
    exist."""

    model_config = ConfigDict(strict=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


_TAGS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str:
    kind = (
        value.get("type") or "message" if isinstance(value, dict) else getattr(value, "type", None)
    )
    return f"<{kind}>" if kind in _TAGS else "<unknown>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[SkipJsonSchema[UnknownItem], Tag("<unknown>")],
    Discriminator(_item_kind),
]


def add_items(items: Sequence[Item], made: Translation) -> None:
    """Add the messages that items stand for to a chat request: reasoning, text and calls of the
    assistant's that follow one another are one message."""
    for index, item in enumerate(items):
        origin = f"input.{index}"
        match item:
            case ReasoningItem():
                _begin_turn(made)
                made.add_reasoning("".join(part.text for part in item.content or ()))
            case FunctionCallItem():
                if not _speaks(made):
                    made.add_message("assistant")
                made.add_call(item.call_id, item.name, item.arguments, origin=origin)
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
