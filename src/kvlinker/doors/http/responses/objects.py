"""Bodies of /v1/responses' answers: the response, its items, its usage, and the events of streams,
each of which has the name of its ``type``, and its number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, RootModel

from kvlinker.doors.http.answers.answering import PromptTokensDetails
from kvlinker.doors.http.answers.link_bodies import LinkBody
from kvlinker.doors.http.answers.logprobs import ChatLogprob
from kvlinker.doors.http.fields.bodies import ResponseBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(ResponseBody):
    """The model's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[JsonValue]
    logprobs: list[ChatLogprob]


class ReasoningTextBody(ResponseBody):
    """The model's reasoning before its text."""

    type: Literal["reasoning_text"]
    text: str


PartBody = Annotated[OutputText | ReasoningTextBody, Field(discriminator="type")]


class MessageOutput(ResponseBody):
    """A message of the assistant's."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningOutput(ResponseBody):
    """The assistant's reasoning."""

    type: Literal["reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[JsonValue]
    content: list[ReasoningTextBody]


class CalledFunctionItem(ResponseBody):
    """A call that the model asks for; its result comes back in a ``function_call_output`` with its
    ``call_id``."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = Annotated[
    MessageOutput | ReasoningOutput | CalledFunctionItem, Field(discriminator="type")
]


class InputTokensDetails(PromptTokensDetails):
    """The prompt tokens whose KV was there and was kept, those of chunks that were computed again,
    and those that this request cached as chunks of their own; all others were fresh.
    ``exact_cached_tokens`` are those of the first that an earlier request computed in just this
    sequence."""

    cache_write_tokens: int


class OutputTokensDetails(ResponseBody):
    """The tokens of the answer that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    """The tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(ResponseBody):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseBody):
    """Why an answer failed: ``code`` is one of OpenAI's, ``type`` the server's own, as all other
    errors have it."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str | None


class ResponseObject(ResponseBody):
    """The whole answer, with the request's fields; ``link`` is there where chunks took part. It can
    be read again where ``store`` is true."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    link: LinkBody | None = None


class ResponseDeletion(ResponseBody):
    """One response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(ResponseBody):
    """A page of a response's input. ``last_id`` is the next page's ``after``, where ``has_more``
    says that there is one."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(ResponseBody):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


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
