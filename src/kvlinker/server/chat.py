"""POST /v1/chat/completions: conversations as OpenAI's API has them, with context caches in the content."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, JsonValue, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.llm import LLM, Answer, Prompt, ReadPrompt
from kvlinker.server.access import TenantParam
from kvlinker.server.answering import LinkBody, UsageBody, completion_responses, finite, respond
from kvlinker.server.bodies import DocumentBody, ResponseBody, Text
from kvlinker.server.decoding import DecodingBody
from kvlinker.server.errors import blaming
from kvlinker.server.messages import MessageBody
from kvlinker.server.models import ServiceParam
from kvlinker.server.prompt_logprobs import PromptLogprobsBody, prompt_logprobs_body
from kvlinker.types.answers import Delta, Finished, TokenLogprob
from kvlinker.types.messages import TemplateOptions

router = APIRouter(tags=["completions"])


class ChatCompletionRequest(DecodingBody):
    """A conversation to answer. OpenAI's fields that would change the answer and are not supported are refused."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = DecodingBody.refused | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "echo": (False,),
        "add_special_tokens": (False,),
    }

    messages: list[MessageBody] = Field(min_length=1)
    documents: list[DocumentBody] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[Text, JsonValue] | None = Field(
        default=None, description="Variables of the model's chat template, such as `enable_thinking`."
    )

    @model_validator(mode="after")
    def _check_ending(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "'continue_final_message' goes on with the last message, and 'add_generation_prompt' begins another: "
                "give one of them.",
                param="continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    @property
    def template_options(self) -> TemplateOptions:
        """How the chat template is to be rendered."""
        return TemplateOptions(
            variables=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
        )

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given, by name."""
        given = super().sampling_fields()
        if limit := self.max_completion_tokens or self.max_tokens:
            given["max_tokens"] = limit
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given


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
    prompt_logprobs: PromptLogprobsBody | None = None


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
    answer_format = ChatFormat(service.llm, logprobs=bool(body.logprobs))

    def build() -> dict[str, ReadPrompt]:
        read = service.llm.read_chat(
            messages,
            documents=documents,
            options=body.template_options,
            policy=body.policy,
            implicit=body.implicit,
            tenant=tenant,
        )
        return {"messages": read}

    length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with blaming("messages", length=length):
        sampling = service.llm.sampling_params(**body.sampling_fields())
        return await respond(service, request, body, build, sampling, answer_format, tenant=tenant)


class ChatFormat:
    """An ``AnswerFormat``."""

    def __init__(self, llm: LLM, *, logprobs: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": llm.model_name,
        }
        self._llm = llm
        self._logprobs = logprobs

    def begin(self, prompts: Sequence[Prompt]) -> None:
        (self._prompt,) = prompts

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
        scored = prompt_logprobs_body(self._prompt, answers[0].prompt_logprobs, self._llm.token_text)
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_logprobs=scored)

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
