"""POST /v1/chat/completions: conversations as OpenAI's API has them, with context caches in the content."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.llm import Answer, ReadPrompt
from kvlinker.server.access import TenantParam
from kvlinker.server.answering import LinkBody, UsageBody, completion_responses, finite, respond
from kvlinker.server.bodies import DocumentBody, Part, RequestBody, ResponseBody, SamplingBody, Text, content_of
from kvlinker.server.errors import blaming
from kvlinker.server.models import ServiceParam
from kvlinker.types.answers import Delta, Finished, TokenLogprob
from kvlinker.types.messages import CachedPart, ChatMessage
from kvlinker.types.sampling import SamplingParams

router = APIRouter(tags=["completions"])

_Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(min_length=1), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class MessageBody(RequestBody):
    """One turn of a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"tool_call_id"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "function_call": (), "refusal": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content
    name: Text | None = None

    def message(self) -> ChatMessage[CachedPart]:
        """Return the message as the library takes it. ``developer`` becomes ``system``, since few chat templates know
        that newer role."""
        content = (self.content,) if isinstance(self.content, str) else content_of(self.content)
        return ChatMessage("system" if self.role == "developer" else self.role, content, self.name)


class ChatCompletionRequest(SamplingBody):
    """A conversation to answer. OpenAI's fields that would change the answer and are not supported are refused."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = SamplingBody.refused | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[MessageBody] = Field(min_length=1)
    documents: list[DocumentBody] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters."""
        return self.sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class TopLogprob(ResponseBody):
    """A token and its log probability, in nats; ``bytes`` are its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that was sampled, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    """Log probabilities of the tokens in ``content``."""

    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(ResponseBody):
    """The message that the model answers with."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(ResponseBody):
    """One answer; ``finish_reason`` is ``stop``, ``length`` or ``cancelled``."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(ResponseBody):
    """The whole answer; ``link`` is there where chunks took part."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageBody
    link: LinkBody | None = None


class ChatDelta(ResponseBody):
    """New output of a choice; its first delta has the role, its last one nothing."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(ResponseBody):
    """A piece of one answer; ``finish_reason`` is null but in the last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(ResponseBody):
    """A piece of a streamed answer; ``usage`` is there with ``stream_options.include_usage``, null but in the last;
    ``link`` is in the first, where chunks took part."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    link: LinkBody | None = None


@router.post(
    "/v1/chat/completions", response_model=ChatCompletion, responses=completion_responses(ChatCompletionChunk.__name__)
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, service: ServiceParam, tenant: TenantParam
) -> Response:
    """Answer a conversation; message content mixes text and context caches, in any order."""
    service.check_model(body.model)
    messages = [message.message() for message in body.messages]
    documents = [document.document() for document in body.documents or ()]
    answer_format = ChatFormat(service.llm.model_name, logprobs=bool(body.logprobs))

    def build() -> dict[str, ReadPrompt]:
        read = service.llm.read_chat(
            messages, documents=documents, policy=body.policy, implicit=body.implicit, tenant=tenant
        )
        return {"messages": read}

    length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with blaming("messages", length=length):
        return await respond(service, request, body, build, body.sampling_params(), answer_format, tenant=tenant)


class ChatFormat:
    """An ``AnswerFormat``."""

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs

    def opening(self, index: int) -> ChatChunkChoice:
        return _choice(index, ChatDelta(role="assistant", content=""))

    def delta(self, index: int, delta: Delta) -> ChatChunkChoice:
        return _choice(index, ChatDelta(content=delta.text), logprobs=self._logprobs_body(delta.logprobs))

    def closing(self, index: int, finished: Finished) -> ChatChunkChoice:
        return _choice(index, ChatDelta(), finish_reason=finished.reason)

    def chunk(self, choices: Sequence[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=list(choices))

    def answer(self, answers: Sequence[Answer], usage: UsageBody) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=answer.text),
                logprobs=self._logprobs_body(answer.logprobs),
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(**self._head, choices=choices, usage=usage)

    def _logprobs_body(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = [
            ChatLogprob(**_entry(entry), top_logprobs=[TopLogprob(**_entry(other)) for other in entry.top])
            for entry in entries
        ]
        return ChatLogprobs(content=content, refusal=None)


def _choice(
    index: int, delta: ChatDelta, *, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": finite(entry.logprob), "bytes": list(entry.text.encode())}
