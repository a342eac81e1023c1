"""Items of input, as /v1/responses takes them, and their translation to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from kvlinker.server.answers.dialects import Translation
from kvlinker.server.fields.bodies import Part, RequestBody, Text, TextPart

_Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(min_length=1), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class MessageItem(RequestBody):
    """One turn of a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class FunctionCallItem(RequestBody):
    """A call of the assistant's, earlier in the conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "namespace": (),
        "async": (False,),
        "async_": (False,),
        "caller": ({"type": "direct"},),
    }

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutputItem(RequestBody):
    """The result of a call."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},)}

    type: Literal["function_call_output"]
    call_id: Text
    output: _Content


class ReasoningText(RequestBody):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(RequestBody):
    """The assistant's reasoning, earlier in the conversation; chat templates that know it show it."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"encrypted_content": ("",)}

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class UnknownItem(BaseModel):
    """The catch-all for items of other types, which are all invalid: its error lists the types that exist."""

    model_config = ConfigDict(strict=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


_TAGS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str:
    kind = value.get("type") or "message" if isinstance(value, dict) else getattr(value, "type", None)
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
    """Add the messages that items stand for to a chat request: reasoning, text and calls of the assistant's that
    follow one another are one message."""
    turn: dict[str, Any] | None = None
    for index, item in enumerate(items):
        origin = f"input.{index}"
        if isinstance(item, ReasoningItem):
            if turn is None or turn["content"] or "tool_calls" in turn:
                turn = made.add_message("assistant")
            texts = "".join(part.text for part in item.content or ())
            if texts or "reasoning_content" in turn:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + texts
        elif isinstance(item, FunctionCallItem):
            turn = turn or made.add_message("assistant")
            calls = turn.setdefault("tool_calls", [])
            number = len(made.values["messages"]) - 1
            made.fields[f"messages.{number}.tool_calls.{len(calls)}.function"] = origin
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, FunctionCallOutputItem):
            turn = None
            result = made.add_message("tool", tool_call_id=item.call_id)
            made.fields[f"messages.{len(made.values['messages']) - 1}.tool_call_id"] = f"{origin}.call_id"
            _add_content(result, item.output, made, f"{origin}.output")
        elif isinstance(item, MessageItem):
            if item.role != "assistant":
                turn = None
                message = made.add_message(item.role)
            elif turn is None or turn["content"] or "tool_calls" in turn:
                message = turn = made.add_message("assistant")
            else:
                message = turn
            _add_content(message, item.content, made, f"{origin}.content")


def _add_content(message: dict[str, Any], content: str | Sequence[Part], made: Translation, path: str) -> None:
    if isinstance(content, str):
        made.add_part(message, TextPart(type="text", text=content), origin=path)
        return
    for index, part in enumerate(content):
        made.add_part(message, part, origin=f"{path}.{index}")
