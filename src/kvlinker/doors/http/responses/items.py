"""Items of input, as /v1/responses takes them, and their translation to messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from kvlinker.base.types.limits import MOST_PARTS
from kvlinker.doors.http.answers.dialects import Translation
from kvlinker.doors.http.fields.bodies import (
    LeftOut,
    NonemptyText,
    RequestBody,
    Text,
    by_type,
    other_than,
)
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


class CustomCallItem(RequestBody):
    """A call of a tool that takes a text, earlier in the conversation."""

    place: ClassVar[Place | None] = Place.CALL_ITEM

    type: Literal["custom_tool_call"]
    call_id: Text
    name: FunctionName
    input: Text


class CustomCallOutputItem(FunctionCallOutputItem):
    """The result of such a call."""

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
