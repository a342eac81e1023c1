"""Events of /v1/responses' streams; each has the name of its ``type``, and its number."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from kvlinker.doors.http.answers.logprobs import ChatLogprob
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.responses.objects import OutputItem, PartBody, ResponseObject


class Event(ResponseBody):
    """The fields of all events."""

    sequence_number: int


class ResponseEvent(Event):
    """The response as it is now: at its beginning, and at its end."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemEvent(Event):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(Event):
    """The fields of events within an item."""

    item_id: str
    output_index: int


class ContentPartEvent(ItemEvent):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: PartBody


class OutputTextDelta(ItemEvent):
    """More of the model's text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ChatLogprob]


class OutputTextDone(ItemEvent):
    """All that the model says in a part."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ChatLogprob]


class ReasoningTextDelta(ItemEvent):
    """More of the model's reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningTextDone(ItemEvent):
    """All that the model thinks in a part."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(ItemEvent):
    """The arguments of a call, as JSON."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(ItemEvent):
    """The arguments of a call, which is whole."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


AnyEvent = (
    ResponseEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)


class ResponseStreamEvent(RootModel[Annotated[AnyEvent, Field(discriminator="type")]]):
    """An event of a stream, which has the name of its ``type``."""
