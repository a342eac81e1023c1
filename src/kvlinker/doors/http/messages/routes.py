"""POST /v1/messages and /v1/messages/count_tokens: the bodies and events of answers, and the
routes."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, JsonValue, RootModel
from pydantic_core import from_json
from starlette.types import Scope

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import Usage
from kvlinker.doors.http.answers.answer_blocks import AnswerBlock, BlockStep
from kvlinker.doors.http.answers.answering import completion_responses
from kvlinker.doors.http.answers.dialects import DialectAnswer, respond_in_dialect
from kvlinker.doors.http.answers.link_bodies import LinkBody, created_tokens, link_body
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.errors import (
    MessagesError,
    as_messages_error,
    error_body,
    error_responses,
)
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.messages.requests import CountTokensRequest, MessagesRequest
from kvlinker.doors.http.models import BodyRoute, ServedModelParam
from kvlinker.engines.contract.contract import Finished
from kvlinker.llm import LLM

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlockBody(ResponseBody):
    """The model's text."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlockBody(ResponseBody):
    """The model's reasoning before its text; there is no signature to check."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockBody(ResponseBody):
    """A call that the model asks for. The client sends its result in a ``tool_result`` with its id.
    If the answer was cut there, ``input`` has the complete fields."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


BlockBody = Annotated[
    TextBlockBody | ThinkingBlockBody | ToolUseBlockBody, Field(discriminator="type")
]


class MessageUsage(ResponseBody):
    """The tokens of a request. The prompt's tokens are in three groups, which add up to its length:
    read from caches (``cache_read_input_tokens``), cached by this request as chunks of their own
    (``cache_creation_input_tokens``), and all others (``input_tokens``)."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(ResponseBody):
    """The whole answer. ``link`` is present where the prompt has chunks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockBody]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    link: LinkBody | None = None


class MessageStart(ResponseBody):
    """Begins a stream. The cached tokens are not known yet: all of the prompt is ``input_tokens``
    here."""

    type: Literal["message_start"]
    message: MessageObject


class ContentBlockStart(ResponseBody):
    """Begins a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: BlockBody


class TextDelta(ResponseBody):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseBody):
    """More of the model's reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(ResponseBody):
    """More of the arguments of a call, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(ResponseBody):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(ResponseBody):
    """Ends a block."""

    type: Literal["content_block_stop"]
    index: int


class StopDelta(ResponseBody):
    """The reason why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ResponseBody):
    """The end of the answer, with its usage. ``link`` is present if the answer was to be kept."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    link: LinkBody | None = None


class MessageStop(ResponseBody):
    """Ends a stream."""

    type: Literal["message_stop"]


class MessageStreamEvent(
    RootModel[
        Annotated[
            MessageStart
            | ContentBlockStart
            | ContentBlockDelta
            | ContentBlockStop
            | MessageDelta
            | MessageStop
            | MessagesError,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a stream, which has the name of its ``type``."""


class MessageAnswer(DialectAnswer):
    """An answer in the words of Anthropic's API."""

    def __init__(self, llm: LLM, request_id: str | None) -> None:
        super().__init__(llm)
        self._id = f"msg_{request_id or secrets.token_hex(12)}"

    def opening(self) -> Iterable[MessageStart]:
        usage = MessageUsage(
            input_tokens=len(self._read.prompt),
            cache_creation_input_tokens=0,
            cache_read_input_tokens=0,
            output_tokens=0,
        )
        return [MessageStart(type="message_start", message=self._message(None, usage))]

    def events_of(
        self, step: BlockStep
    ) -> Iterator[ContentBlockStart | ContentBlockDelta | ContentBlockStop]:
        index = step.block.index
        match step.what:
            case "begin":
                yield ContentBlockStart(
                    type="content_block_start", index=index, content_block=_begun(step.block)
                )
            case "go on":
                yield ContentBlockDelta(type="content_block_delta", index=index, delta=_delta(step))
            case "end":
                yield ContentBlockStop(type="content_block_stop", index=index)

    def closing(self) -> Iterable[MessageDelta | MessageStop]:
        end = self._end()
        stop = StopDelta(stop_reason=self._reason(end), stop_sequence=end.stop_string)
        link = {} if end.kept is None else {"link": link_body([self._read], end.kept)}
        return [
            MessageDelta(type="message_delta", delta=stop, usage=self._usage(end.usage), **link),
            MessageStop(type="message_stop"),
        ]

    def failure(self, error: KVLinkerError, scope: Scope) -> Iterable[MessagesError]:
        return [as_messages_error(error_body(error, scope), error.status, scope)]

    def body(self) -> MessageObject:
        return self._message(self._end(), self._usage(self._end().usage))

    def _end(self) -> Finished:
        assert self._finished is not None
        return self._finished

    def _message(self, end: Finished | None, usage: MessageUsage) -> MessageObject:
        """Return the message as it ended; None for one that begins, which is empty."""
        link = link_body([self._read], None if end is None else end.kept)
        return MessageObject(
            id=self._id,
            type="message",
            role="assistant",
            model=self._llm.model_name,
            content=[_body(block) for block in self._blocks],
            stop_reason=None if end is None else self._reason(end),
            stop_sequence=None if end is None else end.stop_string,
            usage=usage,
            **({} if link is None else {"link": link}),
        )

    def _reason(self, end: Finished) -> StopReason:
        if end.stop_string is not None:
            return "stop_sequence"
        if end.reason != "stop":
            taken = end.usage.prompt_tokens + end.usage.output_tokens
            fills = taken >= self._llm.max_model_len
            return "model_context_window_exceeded" if fills else "max_tokens"
        called = any(block.kind == "call" and block.is_whole for block in self._blocks)
        return "tool_use" if called else "end_turn"

    def _usage(self, usage: Usage) -> MessageUsage:
        created = created_tokens(self._read, usage)
        return MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )


def _begun(block: AnswerBlock) -> TextBlockBody | ThinkingBlockBody | ToolUseBlockBody:
    """Return a block as it begins, without its text."""
    if block.kind == "call":
        return ToolUseBlockBody(type="tool_use", id=block.call_id, name=block.name, input={})
    if block.kind == "reasoning":
        return ThinkingBlockBody(type="thinking", thinking="", signature="")
    return TextBlockBody(type="text", text="", citations=None)


def _body(block: AnswerBlock) -> TextBlockBody | ThinkingBlockBody | ToolUseBlockBody:
    """Return a block with its text."""
    field = {"reasoning": "thinking", "content": "text", "call": "input"}[block.kind]
    value = arguments_of(block.text) if block.kind == "call" else block.text
    return _begun(block).model_copy(update={field: value})


def arguments_of(text: str) -> dict[str, JsonValue]:
    """Return the arguments of a call, which may be cut, as Anthropic's client reads them from a
    stream; numbers beyond a double's range are the largest that are not."""
    try:
        found = from_json(text, allow_partial=True) if text else {}
    except ValueError:  # an integer of thousands of digits
        found = {}
    return _in_range(found) if isinstance(found, dict) else {}


def _in_range(value: Any) -> Any:
    match value:
        case dict():
            return {name: _in_range(each) for name, each in value.items()}
        case list():
            return [_in_range(each) for each in value]
        case float() if math.isnan(value):
            return None
        case float() if math.isinf(value):
            return math.copysign(sys.float_info.max, value)
    return value


def _delta(step: BlockStep) -> TextDelta | ThinkingDelta | InputJsonDelta:
    match step.block.kind:
        case "reasoning":
            return ThinkingDelta(type="thinking_delta", thinking=step.text)
        case "call":
            return InputJsonDelta(type="input_json_delta", partial_json=step.text)
    return TextDelta(type="text_delta", text=step.text)


async def _beta(
    beta: Annotated[str | None, Query(description="Means nothing; clients send it along.")] = None,
) -> None:
    """Take a parameter that clients send along."""


router = APIRouter(tags=["messages"], dependencies=[Depends(_beta)], route_class=BodyRoute)


class TokenCount(ResponseBody):
    """The length of a prompt."""

    input_tokens: int


def _responses() -> dict[int | str, dict[str, Any]]:
    answered = completion_responses(MessageStreamEvent.__name__, ignores=True)[200]
    answered = answered | {
        "description": (
            "The answer; with `stream`, server-sent events that have the names of their types. A"
            " stream that fails half way ends with an event `error`."
        )
    }
    return {200: answered, **error_responses(400, 404, 429, 503, model=MessagesError)}


@router.post("/v1/messages", response_model=MessageObject, responses=_responses())
async def create_message(
    body: MessagesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Answer a conversation, in Anthropic's words; content mixes text, context caches, and results
    of tools."""
    served.report_ignored(body, request.scope)
    answer = MessageAnswer(served.llm, body.request_id)
    return await respond_in_dialect(served, request, body.translated(), answer, tenant=tenant)


@router.post("/v1/messages/count_tokens", responses=error_responses(400, 404, model=MessagesError))
async def count_tokens(
    body: CountTokensRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> TokenCount:
    """Count the tokens of a conversation's prompt. Nothing is cached."""
    served.report_ignored(body, request.scope)
    llm = served.llm
    translation = body.translated()
    chat = await served.encoding.run(request, translation.request)
    with translation.renaming():
        served.check_model(chat.model)
        tools = chat.request_tools(llm).tools
        read = await served.encoding.run(
            request, lambda: chat.read(llm, tools, keeps=False, tenant=tenant)
        )
    note_tokens(request.scope, len(read.prompt))
    return TokenCount(input_tokens=len(read.prompt))
