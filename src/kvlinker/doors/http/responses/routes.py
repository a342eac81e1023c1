"""/v1/responses: answer, read and delete, and the length of a prompt: the bodies and events of
answers, how an answer is formatted, kept and read, and the routes."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, JsonValue, RootModel, TypeAdapter
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.types import Scope

from kvlinker.base.errors import InvalidRequestError, KVLinkerError, ResponseNotFoundError
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.messages import MARKS
from kvlinker.base.types.responses import KeptResponse
from kvlinker.doors.http.answers.answer_blocks import AnswerBlock, BlockStep
from kvlinker.doors.http.answers.answering import PromptTokensDetails, completion_responses
from kvlinker.doors.http.answers.dialects import DialectAnswer, respond_in_dialect
from kvlinker.doors.http.answers.link_bodies import LinkBody, created_tokens, link_body
from kvlinker.doors.http.answers.logprobs import ChatLogprob, logprob_bodies
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.errors import error_body, error_responses
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.bodies import LeftOut, ResponseBody
from kvlinker.doors.http.models import BodyRoute, ServedModel, ServedModelParam
from kvlinker.doors.http.responses.requests import (
    Item,
    ItemReference,
    MessageItem,
    ResponsesRequest,
    ResponseTool,
)
from kvlinker.llm import LLM

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=BodyRoute)

logger = logging.getLogger(__name__)


class _ResponseIdConvertor(StringConvertor):
    """Takes any segment for an id but that of the route that counts tokens, whose other methods are
    a 405, not a 404."""

    regex = r"(?!input_tokens$)[^/]+"


register_url_convertor("response_id", _ResponseIdConvertor())

RESPONSE_ID = "{response_id:response_id}"
"""The segment of a path that is the parameter ``response_id``."""

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
    """A call that the model asks for. The client sends its result in a ``function_call_output``
    with its ``call_id``."""

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
    """The prompt's tokens by the source of their KV: ``cached_tokens`` were reused as they were,
    ``recomputed_tokens`` are tokens of chunks that were computed again, and ``cache_write_tokens``
    were cached by this request as chunks of their own. All others are fresh.
    ``exact_cached_tokens`` are the cached tokens that an earlier request computed in the same
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
    """The reason why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseBody):
    """The reason why an answer failed: ``code`` is one of OpenAI's, and ``type`` the server's own,
    as in all other errors."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str | None


class ResponseObject(ResponseBody):
    """The whole answer, with the request's fields. ``link`` is present where the prompt has chunks.
    If ``store`` is true, it can be read again."""

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
    """A page of a response's input. If ``has_more`` is true, ``last_id`` is the next page's
    ``after``."""

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
    """The beginning of an item, or the whole item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(Event):
    """The fields of events within an item."""

    item_id: str
    output_index: int


class ContentPartEvent(ItemEvent):
    """The beginning of a part of an item, or the whole part."""

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
    """The whole text of a part."""

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
    """The whole reasoning of a part."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(ItemEvent):
    """The arguments of a call, as JSON."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(ItemEvent):
    """The whole arguments of a call."""

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


ItemStatus = Literal["in_progress", "completed", "incomplete"]

_BLOCK_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


class ResponseAnswer(DialectAnswer):
    """An answer in the words of OpenAI's newer API."""

    def __init__(
        self, llm: LLM, body: ResponsesRequest, keep: Callable[[ResponseObject], bool] | None
    ) -> None:
        """``keep`` keeps the whole answer, and returns whether it is kept; None where it is not to
        be."""
        super().__init__(llm)
        self._body = body
        self._keep = keep
        name = "" if body.request_id is None else f"{body.request_id}_"
        self._id = f"resp_{name}{secrets.token_hex(12)}"  # no two have the same
        self._created_at = int(time.time())
        self._ids: dict[int, str] = {}
        self._numbers = 0

    def opening(self) -> Iterable[AnyEvent]:
        return [
            ResponseEvent(type=kind, response=self._response("in_progress"), **self._number())
            for kind in ("response.created", "response.in_progress")
        ]

    def events_of(self, step: BlockStep) -> Iterator[AnyEvent]:
        block = step.block
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        match step.what:
            case "begin":
                item = self._item(block, begins=True)
                yield OutputItemEvent(
                    type="response.output_item.added",
                    output_index=block.index,
                    item=item,
                    **self._number(),
                )
                if block.kind != "call":
                    yield self._part("response.content_part.added", block, place)
            case "go on":
                yield self._more(step, place)
            case "end":
                yield self._done(block, place)
                if block.kind != "call":
                    yield self._part("response.content_part.done", block, place)
                yield OutputItemEvent(
                    type="response.output_item.done",
                    output_index=block.index,
                    item=self._item(block),
                    **self._number(),
                )

    def closing(self) -> Iterable[AnyEvent]:
        whole = self.body()
        kind: Any = f"response.{whole.status}"
        return [ResponseEvent(type=kind, response=whole, **self._number())]

    def failure(self, error: KVLinkerError, scope: Scope) -> Iterable[AnyEvent]:
        details = error_body(error, scope).error
        failure = ResponseFailure(
            code=_failure_code(error.status), message=details.message, type=details.code
        )
        failed = self._response("failed").model_copy(update={"error": failure})
        return [ResponseEvent(type="response.failed", response=failed, **self._number())]

    def body(self) -> ResponseObject:
        assert self._finished is not None
        reason = self._finished.reason
        whole = self._response("completed" if reason == "stop" else "incomplete")
        if self._keep is None:
            return whole
        # a client that has left knows no answer to go on from
        kept = reason != "cancelled" and self._keep(whole)
        return whole.model_copy(update={"store": kept})

    def _number(self) -> dict[str, int]:
        """Return the number of the next event."""
        self._numbers += 1
        return {"sequence_number": self._numbers - 1}

    def _item_id(self, block: AnswerBlock) -> str:
        return self._ids.setdefault(
            block.index, f"{_BLOCK_PREFIXES[block.kind]}_{secrets.token_hex(12)}"
        )

    def _more(self, step: BlockStep, place: dict[str, Any]) -> AnyEvent:
        place, text = place | self._number(), step.text
        match step.block.kind:
            case "call":
                return ArgumentsDelta(
                    type="response.function_call_arguments.delta", delta=text, **place
                )
            case "reasoning":
                return ReasoningTextDelta(
                    type="response.reasoning_text.delta", content_index=0, delta=text, **place
                )
        return OutputTextDelta(
            type="response.output_text.delta",
            content_index=0,
            delta=text,
            logprobs=logprob_bodies(step.logprobs, self._llm.token_bytes),
            **place,
        )

    def _done(self, block: AnswerBlock, place: dict[str, Any]) -> AnyEvent:
        place = place | self._number()
        if block.kind == "call":
            return ArgumentsDone(
                type="response.function_call_arguments.done",
                name=block.name,
                arguments=block.text,
                **place,
            )
        if block.kind == "reasoning":
            return ReasoningTextDone(
                type="response.reasoning_text.done", content_index=0, text=block.text, **place
            )
        return OutputTextDone(
            type="response.output_text.done",
            content_index=0,
            text=block.text,
            logprobs=logprob_bodies(block.logprobs, self._llm.token_bytes),
            **place,
        )

    def _part(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        block: AnswerBlock,
        place: dict[str, Any],
    ) -> ContentPartEvent:
        shown = AnswerBlock(block.index, block.kind) if kind.endswith("added") else block
        part = _reasoning(shown.text) if block.kind == "reasoning" else self._text(shown)
        return ContentPartEvent(type=kind, content_index=0, part=part, **(place | self._number()))

    def _item(
        self, block: AnswerBlock, *, begins: bool = False
    ) -> MessageOutput | ReasoningOutput | CalledFunctionItem:
        """Return an item as it ended; one that ``begins`` is empty."""
        item_id = self._item_id(block)
        ended: ItemStatus = "completed" if block.is_whole else "incomplete"
        status: ItemStatus = "in_progress" if begins else ended
        if block.kind == "call":
            _, namespace = self._body.functions().get(block.name, (None, None))
            return CalledFunctionItem(
                type="function_call",
                **({} if namespace is None else {"namespace": namespace}),
                id=item_id,
                call_id=block.call_id,
                name=block.name,
                arguments="" if begins else block.text,
                status=status,
            )
        if block.kind == "reasoning":
            thoughts = [] if begins else [_reasoning(block.text)]
            return ReasoningOutput(
                type="reasoning", id=item_id, status=status, summary=[], content=thoughts
            )
        texts = [] if begins else [self._text(block)]
        return MessageOutput(
            type="message", id=item_id, role="assistant", status=status, content=texts
        )

    def _response(self, status: Status) -> ResponseObject:
        body, params = self._body, self._llm.sampling_params(**self._body.sampling_settings())
        kept = None if self._finished is None else self._finished.kept
        link = link_body([self._read], kept)
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created_at,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            background=False,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._llm.model_name,
            output=[self._item(block) for block in self._blocks],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning_settings(),
            service_tier="default",
            store=self._keep is not None,
            temperature=params.temperature,
            text=body.text_settings(),
            tool_choice=body.tool_choice_settings(),
            tools=[
                tool.model_dump(exclude=set(MARKS))
                | (tool.marks() if isinstance(tool, ResponseTool) else {})
                for tool in body.tools or ()
            ],
            top_p=params.top_p,
            truncation="disabled",
            usage=None if self._finished is None else self._usage(self._finished.usage),
            **({} if link is None else {"link": link}),
        )

    def _text(self, block: AnswerBlock) -> OutputText:
        return OutputText(
            type="output_text",
            text=block.text,
            annotations=[],
            logprobs=logprob_bodies(block.logprobs, self._llm.token_bytes),
        )

    def _usage(self, usage: Usage) -> ResponseUsage:
        thoughts = self._reader.thoughts
        thought = len(self._llm.token_ids(thoughts)) if thoughts else 0
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.cached_tokens,
                exact_cached_tokens=usage.exact_cached_tokens,
                recomputed_tokens=usage.recomputed_tokens,
                reusable_tokens=self._read.reusable_of(usage),
                cache_write_tokens=created_tokens(self._read, usage),
            ),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=min(thought, usage.output_tokens)
            ),
            total_tokens=usage.prompt_tokens + usage.output_tokens,
        )


def _failure_code(status: int) -> Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]:
    """Return OpenAI's word for an error of this HTTP status."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def _reasoning(text: str) -> ReasoningTextBody:
    return ReasoningTextBody(type="reasoning_text", text=text)


_ABSENT = "does not exist, has expired or was deleted, or its request had `store: false`"

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])

_ITEM_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
"""The prefixes of items' ids, by type."""

_INPUT_ID = re.compile(r"[a-z]+_(resp_.+)_\d+")
"""The id of an item of kept input: its prefix, its response, and its place among all of them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's conversation, with kept items in place of all that the request refers to."""

    earlier: Sequence[Item]
    """The items up to the response that the request goes on from."""

    items: Sequence[Item]
    """The items of the request's own input, one for each entry."""

    referred: Mapping[str, str]
    """The JSON of the kept items that the input refers to, by id."""


def read_conversation(served: ServedModel, body: ResponsesRequest, tenant: str) -> Conversation:
    """Return a request's conversation. Raises InvalidRequestError and ResponseNotFoundError for
    what the tenant has not."""
    log, now = served.llm.catalog.responses, time.time()
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        turns = log.conversation(body.previous_response_id, tenant, now)
        if turns is None:
            raise InvalidRequestError(
                f"Previous response with id {body.previous_response_id!r} not found: it, or one"
                f" that it goes on from, {_ABSENT}. Send the whole conversation as 'input'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        for turn in turns:
            earlier += [*json.loads(turn.input), *map(json.loads, turn.output)]
    own = body.own_items()
    referred = _kept_items(
        served, [item.id for item in own if isinstance(item, ItemReference)], tenant, now
    )
    items: list[Item] = []
    for index, item in enumerate(own):
        if not isinstance(item, ItemReference):
            items.append(item)
        elif item.id in referred:
            items += _ITEMS.validate_json(f"[{referred[item.id]}]")
        else:
            raise ResponseNotFoundError(
                f"Item with id {item.id!r} not found: it {_ABSENT}. Send the item itself, as"
                " clients do with `store: false`.",
                param=f"input.{index}.id",
                code="item_not_found",
            )
    return Conversation(_ITEMS.validate_python(earlier), items, referred)


def _kept_items(served: ServedModel, ids: Sequence[str], tenant: str, now: float) -> dict[str, str]:
    """Return the JSON of those of the items that are kept, of answers and of inputs, by id."""
    if not ids:
        return {}
    log = served.llm.catalog.responses
    found = log.items(ids, tenant, now)
    responses = {name for each in ids if (name := _response_of(each)) is not None}
    for own_input in log.inputs(list(responses), tenant, now) if responses else ():
        found |= {item["id"]: json.dumps(item) for item in json.loads(own_input)}
    return {each: found[each] for each in ids if each in found}


def _response_of(item_id: str) -> str | None:
    """Return the id of the response whose input has the item; None for an item of an answer."""
    named = _INPUT_ID.fullmatch(item_id)
    return None if named is None else named[1]


def keep(
    served: ServedModel,
    body: ResponsesRequest,
    conversation: Conversation,
    whole: ResponseObject,
    tenant: str,
) -> bool:
    """Keep a whole answer; returns whether it is kept. The answer is there, so that a catalog that
    fails is no error of the request."""
    response = KeptResponse(
        whole.id,
        whole.model_dump_json(exclude_unset=True, exclude={"output"}),
        json.dumps(
            [
                json.loads(conversation.referred[item.id])
                if isinstance(item, ItemReference)
                else _as_kept(item, f"{whole.id}_{index}")
                for index, item in enumerate(body.own_items())
                if not isinstance(item, LeftOut)
            ]
        ),
        {item.id: item.model_dump_json(exclude_unset=True) for item in whole.output},
    )
    try:
        served.llm.catalog.responses.add(
            response,
            tenant,
            now=time.time(),
            ttl=served.settings.response_ttl,
            previous=body.previous_response_id,
            used=[_response_of(each) or each for each in conversation.referred],
        )
    except KVLinkerError as error:
        logger.warning("An answer was not kept for requests to go on from: %s", error.message)
        return False
    return True


def read_response(served: ServedModel, response_id: str, tenant: str) -> dict[str, Any]:
    """Return a kept response as it was answered. Raises ResponseNotFoundError."""
    kept = served.llm.catalog.responses.get(response_id, tenant, time.time())
    if kept is None:
        raise _not_found(response_id)
    response: dict[str, Any] = json.loads(kept.body)
    return response | {"output": list(map(json.loads, kept.output.values()))}


def read_input(served: ServedModel, response_id: str, tenant: str) -> list[dict[str, Any]]:
    """Return all items that a kept response answers, the first one first. Raises
    ResponseNotFoundError."""
    turns = served.llm.catalog.responses.conversation(response_id, tenant, time.time())
    if turns is None:
        raise _not_found(response_id)
    items = []
    for turn in turns[:-1]:
        items += [*json.loads(turn.input), *map(json.loads, turn.output)]
    return [*items, *json.loads(turns[-1].input)]


def delete_response(served: ServedModel, response_id: str, tenant: str) -> None:
    """Delete a kept response. Raises ResponseNotFoundError."""
    if not served.llm.catalog.responses.delete(response_id, tenant, time.time()):
        raise _not_found(response_id)


def _not_found(response_id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"Response with id {response_id!r} not found: it {_ABSENT}.", param="response_id"
    )


def _as_kept(item: Any, name: str) -> dict[str, Any]:
    """Return an item of input with an id, which ends with ``name``, and as the list of parts that
    OpenAI lists."""
    kept: dict[str, Any] = item.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        kept["content"] = [{"type": kind, "text": item.content}]
    return {"type": item.type, "id": f"{_ITEM_PREFIXES[item.type]}_{name}", **kept}


def _responses() -> dict[int | str, dict[str, Any]]:
    described = completion_responses(ResponseStreamEvent.__name__, ignores=True)
    described[200]["description"] = (
        "The answer; with `stream`, server-sent events that have the names of their types. A stream"
        " that fails half way ends with an event `response.failed`."
    )
    return described


@router.post("", response_model=ResponseObject, responses=_responses())
async def create_response(
    body: ResponsesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Answer a conversation that is given as items: all of them, or those that follow on an earlier
    response. The answer is kept for a while, unless `store` is false."""
    served.report_ignored(body, request.scope)
    conversation = await served.encoding.run(
        request, lambda: read_conversation(served, body, tenant)
    )
    keeps = body.store is not False and served.settings.response_ttl > 0
    kept = partial(keep, served, body, conversation, tenant=tenant) if keeps else None
    return await respond_in_dialect(
        served,
        request,
        body.translated(conversation.earlier, conversation.items),
        ResponseAnswer(served.llm, body, kept),
        tenant=tenant,
    )


@router.post("/input_tokens", responses=error_responses(400, 404))
async def count_input_tokens(
    body: ResponsesRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> InputTokens:
    """Count the tokens of a conversation's prompt. Nothing is answered, cached or kept."""
    served.report_ignored(body, request.scope)
    llm = served.llm
    conversation = await served.encoding.run(
        request, lambda: read_conversation(served, body, tenant)
    )
    translation = body.translated(conversation.earlier, conversation.items)
    chat = await served.encoding.run(request, translation.request)
    with translation.renaming():
        served.check_model(chat.model)
        tools = chat.request_tools(llm).tools
        read = await served.encoding.run(
            request, lambda: chat.read(llm, tools, keeps=False, tenant=tenant)
        )
    note_tokens(request.scope, len(read.prompt))
    return InputTokens(input_tokens=len(read.prompt))


@router.get(f"/{RESPONSE_ID}", response_model=ResponseObject, responses=error_responses(400, 404))
def get_response(
    response_id: str,
    served: ServedModelParam,
    tenant: TenantParam,
    stream: Annotated[bool, Query(description="Kept answers have ended: false.")] = False,
) -> Response:
    """Read a kept answer."""
    if stream:
        raise InvalidRequestError(
            "Kept answers have ended, and are read whole: leave 'stream' out.", param="stream"
        )
    return JSONResponse(read_response(served, response_id, tenant))


@router.delete(f"/{RESPONSE_ID}", responses=error_responses(404))
def remove_response(
    response_id: str, served: ServedModelParam, tenant: TenantParam
) -> ResponseDeletion:
    """Delete a kept answer with its input. Requests cannot continue from it any more, nor from
    answers that continued from it."""
    delete_response(served, response_id, tenant)
    return ResponseDeletion(id=response_id)


@router.get("/{response_id}/input_items", responses=error_responses(400, 404))
def list_input_items(
    response_id: str,
    served: ServedModelParam,
    tenant: TenantParam,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(min_length=1)] = None,
    order: Literal["asc", "desc"] = "desc",
) -> InputItems:
    """List the items that a kept answer answers, those of earlier responses included. ``after`` is
    the last id of the page before."""
    items = read_input(served, response_id, tenant)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"'after' names no item: {after!r}.", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page = items[first : first + limit]
    return InputItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=first + limit < len(items),
    )
