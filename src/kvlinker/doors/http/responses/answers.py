"""Formats an answer for /v1/responses, whole or in events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Literal

from starlette.types import Scope

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.messages import MARKS
from kvlinker.doors.http.answers.answer_blocks import AnswerBlock, BlockStep
from kvlinker.doors.http.answers.dialects import DialectAnswer
from kvlinker.doors.http.answers.link_bodies import created_tokens, link_body
from kvlinker.doors.http.answers.logprobs import logprob_bodies
from kvlinker.doors.http.edge.errors import error_body
from kvlinker.doors.http.responses.objects import (
    AnyEvent,
    ArgumentsDelta,
    ArgumentsDone,
    CalledFunctionItem,
    ContentPartEvent,
    IncompleteDetails,
    InputTokensDetails,
    MessageOutput,
    OutputItemEvent,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    ReasoningOutput,
    ReasoningTextBody,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    Status,
)
from kvlinker.doors.http.responses.requests import ResponsesRequest, ResponseTool
from kvlinker.llm import LLM

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


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
        return self._ids.setdefault(block.index, f"{_PREFIXES[block.kind]}_{secrets.token_hex(12)}")

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
        body, params = self._body, self._llm.sampling_params(**self._body.told_sampling())
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
