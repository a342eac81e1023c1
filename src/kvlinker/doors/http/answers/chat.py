"""POST /v1/chat/completions: conversations as OpenAI's API has them, with context caches in the
content. Messages, their parts and documents are here for all routes that take conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import AnswerPiece, Delta, TokenLogprob
from kvlinker.base.types.limits import (
    MOST_CALLS,
    MOST_DOCUMENTS,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
)
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    Content,
    ContextCacheReference,
    Document,
    MarkedText,
    TemplateOptions,
    TextSource,
)
from kvlinker.base.types.tools import Tool
from kvlinker.doors.http.answers.answering import (
    ChoiceOutput,
    Choices,
    CompletionAnswer,
    UsageBody,
    completion_responses,
    respond,
)
from kvlinker.doors.http.answers.link_bodies import LinkBody
from kvlinker.doors.http.answers.logprobs import (
    ChatLogprob,
    PromptLogprobsBody,
    logprob_bodies,
    prompt_logprobs_body,
)
from kvlinker.doors.http.edge.errors import blame, note_ignored
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.bodies import (
    LeftOut,
    MarkableBody,
    RequestBody,
    ResponseBody,
    Text,
    other_than,
)
from kvlinker.doors.http.fields.foreign import MEDIA, NO_MEDIA, Place
from kvlinker.doors.http.fields.generation import (
    MostTokens,
    ReasoningFields,
    SamplingBody,
)
from kvlinker.doors.http.fields.tools import (
    AllowedToolsBody,
    CallDeltas,
    NamedToolBody,
    ToolBody,
    ToolCallBody,
    ToolCallDelta,
    ToolCallObject,
    ToolChoiceBody,
    ToolOrOther,
    call_objects,
)
from kvlinker.doors.http.models import BodyRoute, ServedModelParam
from kvlinker.engines.contract.contract import Finished
from kvlinker.llm import LLM, Answer, ReadPrompt
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.marks import ttl_seconds
from kvlinker.service.answer import finish_reason
from kvlinker.service.reading.reader import PreparedRequest, RequestTools

router = APIRouter(tags=["completions"], route_class=BodyRoute)


class TextPart(MarkableBody):
    """Text, under any of the names that OpenAI's routes have for it: fresh, or a chunk that is
    found by content if one of the marks is given."""

    place: ClassVar[Place | None] = Place.TEXT_PART

    type: Literal["text", "input_text", "output_text"]
    text: Text

    def content(self) -> str | MarkedText:
        """Return the text as the library takes it."""
        if self.cache_control is None and self.prompt_cache_breakpoint is None:
            return self.text
        ttl = self.cache_control.ttl if self.cache_control else None
        return MarkedText(self.text, None if ttl is None else ttl_seconds(ttl))


class ContextCachePart(RequestBody):
    """The chunk of a context cache."""

    place: ClassVar[Place | None] = Place.CONTEXT_CACHE_PART

    type: Literal["context_cache"]
    id: Text


class RefusalPart(RequestBody):
    """The assistant's words where it refused, earlier in the conversation."""

    type: Literal["refusal"]
    refusal: Text


_PART_TAGS = {
    "text": "<text>",
    "input_text": "<text>",
    "output_text": "<text>",
    "context_cache": "<context_cache>",
    "refusal": "<refusal>",
}


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PART_TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ContextCachePart, Tag("<context_cache>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[LeftOut, other_than(*_PART_TAGS), Tag("<other>")],
    Discriminator(_part_kind),
]

_Several = TypeVar("_Several")

TextOr = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Several, Tag("<several>")],
    Discriminator(lambda value: "<several>" if isinstance(value, list) else "<text>"),
]
"""A text, or a list of something."""

TextOrParts = TextOr[Annotated[list[Part], Field(max_length=MOST_PARTS)]]
"""The content of a message: a text, or texts and context caches in any order. No parts are an empty
text: tools that find nothing have clients send them."""


def show_part(part: Part) -> TextPart | ContextCachePart | None:
    """Return a part as the prompt shows it: in place of media stands a text that says so, so that a
    conversation with some goes on. None for parts of other types, which it does not show."""
    match part:
        case RefusalPart():
            return TextPart(type="text", text=part.refusal)
        case LeftOut():
            what = MEDIA.get(part.type)
            text = f"[{what} left out: {NO_MEDIA}]"
            return None if what is None else TextPart(type="text", text=text)
    return part


def content_of(parts: Sequence[Part]) -> Content[CachedPart]:
    """Return the parts of a message or a prompt as the library takes them."""
    return tuple(
        part.content() if isinstance(part, TextPart) else ContextCacheReference(part.id)
        for part in map(show_part, parts)
        if part is not None
    )


class DocumentBody(RequestBody):
    """A document that the conversation is about, which becomes a chunk. Chat templates that take
    documents also get its other fields, such as ``title``."""

    model_config = ConfigDict(extra="allow")

    text: Text
    title: Text | None = None

    def document(self) -> Document[CachedPart]:
        """Return the document as the library takes it."""
        title = {} if self.title is None else {"title": self.title}
        return Document(
            MarkedText(self.text, source=TextSource.DOCUMENT), title | (self.model_extra or {})
        )


class MessageBody(RequestBody):
    """One turn of a conversation; only an assistant's may have no content. The assistant's
    ``reasoning_content``, or ``reasoning``, is shown by chat templates that know it; fields that
    are not known here are shown by none. A message of role ``tool`` is the result of the call
    ``tool_call_id``."""

    model_config = ConfigDict(extra="ignore")

    place: ClassVar[Place | None] = Place.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: list[ToolCallBody] | None = Field(default=None, max_length=MOST_CALLS)
    tool_call_id: Text | None = None

    def check(self) -> None:
        """Refuse a message without content that needs some, fields of another role, and a result
        without the id of its call."""
        kind: str | PydanticCustomError
        if self.content is None and self.role != "assistant":
            kind = "missing"
            if "content" in self.model_fields_set:
                kind = PydanticCustomError(
                    "content_type", "Input should be text or a list of parts"
                )
            raise self._refusal("content", None, kind)
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if (value := getattr(self, name)) and self.role != role:
                kind = PydanticCustomError("unsupported_parameter", "not supported; leave it out")
                raise self._refusal(name, value, kind)
        if self.role == "tool" and not self.tool_call_id:
            raise self._refusal("tool_call_id", None, "missing")

    def message(self) -> ChatMessage[CachedPart]:
        """Return the message as the library takes it. ``developer`` becomes ``system``, since few
        chat templates know that newer role."""
        content = (
            (self.content,) if isinstance(self.content, str) else content_of(self.content or ())
        )
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, content, self.name, self._template_fields())

    def _template_fields(self) -> Mapping[str, Any]:
        """Return the other fields of the message that chat templates may show."""
        fields: dict[str, Any] = {}
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if self.role == "assistant" and thoughts is not None:
            fields |= dict.fromkeys(("reasoning_content", "reasoning"), thoughts)
        if self.tool_calls:
            fields["tool_calls"] = [call.template_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return fields


class ChatCompletionRequest(ReasoningFields, SamplingBody):
    """A conversation to answer. Fields of OpenAI's that would change the answer, and that this
    server does not support, are refused."""

    place: ClassVar[Place | None] = Place.CHAT
    messages: list[MessageBody] = Field(min_length=1, max_length=MOST_MESSAGES)
    documents: list[DocumentBody] | None = Field(default=None, max_length=MOST_DOCUMENTS)
    max_completion_tokens: MostTokens = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[ToolOrOther] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "'continue_final_message' continues the last message, and"
                " 'add_generation_prompt' begins another: give one of them.",
                param="continue_final_message",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs"
            )
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            for call in message.tool_calls or ():
                called.add(call.id)
            if message.role == "tool" and message.tool_call_id not in called:
                raise InvalidRequestError(
                    f"{message.tool_call_id!r} is the id of no call in 'tool_calls' of a message"
                    " before.",
                    param=f"messages.{index}.tool_call_id",
                )

    def read(
        self, llm: LLM, tools: Sequence[Tool], *, keeps: bool = True, tenant: str
    ) -> ReadPrompt:
        """Make the prompt, which shows ``tools``. Raises the errors of ``LLM.read_chat``."""
        link = self.linking
        return llm.read_chat(
            list(map(MessageBody.message, self.messages)),
            documents=list(map(DocumentBody.document, self.documents or ())),
            options=TemplateOptions(
                tools=tuple(tools),
                variables=self.reasoning_effect(llm).variables,
                add_generation_prompt=self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
            ),
            policy=link.policy,
            implicit=link.implicit,
            keeps=keeps,
            salt=self.cache_salt,
            order=link.order or "given",
            tenant=tenant,
        )

    def request_tools(self, llm: LLM) -> RequestTools:
        """Return how answers may use the tools. Raises InvalidRequestError for a choice of tools
        that are not offered."""
        offered: list[ToolBody] = []
        for tool in self.tools or ():
            if isinstance(tool, ToolBody):
                offered.append(tool)
        choice: Any = self.tool_choice
        match self.tool_choice:
            case NamedToolBody():
                choice = self.tool_choice.model_dump()
            case AllowedToolsBody(allowed_tools=allowed):
                choice, offered = allowed.mode, self.tool_choice.offered(offered)
            case LeftOut():
                choice = None
            case "auto" if self.tools and not offered:
                choice = None  # all of them were left out
        return llm.request_tools(
            list(map(ToolBody.tool, offered)),
            choice,
            several=self.parallel_tool_calls is not False,
            has_form=self.grammar() is not None,
            most_reasoning=self.reasoning_effect(llm).limit,
        )

    def prepare(self, llm: LLM, request_tools: RequestTools, *, tenant: str) -> PreparedRequest:
        """Return the prompt, which shows the tools, and how to answer it. It takes long for long
        conversations: call it in a thread. Raises InvalidRequestError, and the errors of
        ``LLM.read_chat``."""
        link = self.linking
        read = self.read(llm, request_tools.tools, tenant=tenant)
        fields = request_tools.sampling_fields(read.prompt, self.sampling_fields())
        reader = partial(request_tools.reader, read.prompt)
        return PreparedRequest(
            {"messages": read},
            llm.sampling_params(**fields),
            tenant,
            bool(link.explain),
            bool(link.attention),
            self.keep_request(llm, reader),
            link.step,
            reader if request_tools.tools else None,
        )

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given, by name."""
        given = super().sampling_fields()
        if limit := self.max_completion_tokens or self.max_tokens:
            given["max_tokens"] = limit
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given


class ChatLogprobs(ResponseBody):
    """Log probabilities of the tokens in ``content``."""

    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(ResponseBody):
    """The message that the model answers with. Its reasoning, under two names, and its calls of
    tools are separate from ``content``, which is null if there are only calls. ``tool_calls`` is
    absent if there are none."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallObject] = Field(default=[])


class ChatChoice(ResponseBody):
    """One answer; ``finish_reason`` is ``stop``, ``tool_calls``, ``length`` or ``cancelled``."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatCompletion(ResponseBody):
    """The whole answer. ``link`` is present where the prompt has chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageBody
    link: LinkBody | None = None
    prompt_logprobs: PromptLogprobsBody | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(ResponseBody):
    """New output of a choice. The first delta has the role, and the last one nothing. ``content``
    is null in the first delta of an answer that has only calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = Field(default=[])


class ChatChunkChoice(ResponseBody):
    """A piece of one answer. ``finish_reason`` is null in all pieces before the last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseBody):
    """A piece of a streamed answer. ``usage`` is present with ``stream_options.include_usage``, and
    null in all pieces before the last. ``link`` is in the first piece, where the prompt has chunks,
    and again in the last one if the request asks for an explanation. ``prompt_token_ids`` are in
    the first piece, if the request asks for them."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    link: LinkBody | None = None
    prompt_token_ids: list[int] | None = None


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=completion_responses(ChatCompletionChunk.__name__, ignores=True),
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Answer a conversation; message content mixes text and context caches, in any order."""
    served.check_model(body.model)
    served.report_ignored(body, request.scope)
    if ignored := body.reasoning_effect(served.llm).ignored:
        note_ignored(request.scope, ignored)
    request_tools = body.request_tools(served.llm)
    length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    try:
        return await respond(
            served,
            request,
            partial(body.prepare, served.llm, request_tools, tenant=tenant),
            ChatAnswer(served.llm, request_tools, body),
            n=body.choices,
            stream=bool(body.stream),
        )
    except InvalidRequestError as error:
        blame(error, "messages", length=length)
        raise


class ChatAnswer(CompletionAnswer):
    """An answer to a conversation."""

    _body: ChatCompletionRequest

    def __init__(self, llm: LLM, request_tools: RequestTools, body: ChatCompletionRequest) -> None:
        super().__init__(llm, body, "chatcmpl")
        self._request_tools = request_tools
        self._tells_prompt = bool(body.return_token_ids)
        self._readers: dict[int, Reader] = {}
        self._calls: defaultdict[int, CallDeltas] = defaultdict(CallDeltas)

    def opening(self, index: int) -> ChatChunkChoice:
        content = None if self._request_tools.enforces_calls else ""
        return _choice(index, ChatDelta(role="assistant", content=content))

    def delta(self, index: int, delta: Delta) -> ChatChunkChoice | None:
        logprobs = self._logprobs_body(delta.logprobs)
        told = self._delta(index, self._reader(index).feed(delta.text))
        ids = list(delta.token_ids) if self._body.return_token_ids else None
        if not (told.model_fields_set or delta.logprobs or ids):
            return None
        return _choice(index, told, logprobs=logprobs, token_ids=ids)

    def closing(self, index: int, finished: Finished) -> ChatChunkChoice:
        told = self._delta(index, self._reader(index).finish(cut=finished.reason != "stop"))
        reason = finish_reason(finished.reason, called=self._calls[index].complete)
        return _choice(index, told, finish_reason=reason)

    def chunk(self, choices: Sequence[ChatChunkChoice]) -> ChatCompletionChunk:
        told: dict[str, Any] = {}
        if self._tells_prompt:
            told["prompt_token_ids"] = self._prompts[0].tokens.tolist()
            self._tells_prompt = False
        return ChatCompletionChunk(
            **self._head, object="chat.completion.chunk", choices=list(choices), **told
        )

    def whole(self, choices: Choices, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        content = super().whole(choices, outputs)
        for choice in content["choices"]:
            if not choice["message"]["tool_calls"]:
                del choice["message"]["tool_calls"]
        return content

    def answer(self, answers: Sequence[Answer], usage: UsageBody) -> ChatCompletion:
        choices = [self._whole(index, answer) for index, answer in enumerate(answers)]
        scored = prompt_logprobs_body(
            self._prompts[0], answers[0].prompt_logprobs, self._llm.token_text
        )
        return ChatCompletion(
            **self._head,
            choices=choices,
            usage=usage,
            prompt_logprobs=scored,
            prompt_token_ids=self._prompts[0].tokens.tolist() if self._tells_prompt else None,
        )

    def _whole(self, index: int, answer: Answer) -> ChatChoice:
        answered = answer.read_by(self._reader(index))
        reasoning = (answered.reasoning or None) if self._body.tells_reasoning else None
        message = AssistantMessage(
            content=None if answered.tool_calls and not answered.text else answered.text,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=call_objects(answered.tool_calls),
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs_body(answer.logprobs),
            finish_reason=answered.finish_reason,
            token_ids=list(answer.token_ids) if self._body.return_token_ids else None,
        )

    def _reader(self, index: int) -> Reader:
        """Return the reader of a choice."""
        if index not in self._readers:
            self._readers[index] = self._request_tools.reader(self._prompts[0])
        return self._readers[index]

    def _delta(self, index: int, pieces: Sequence[AnswerPiece]) -> ChatDelta:
        """Return pieces of an answer as streams send them; without fields if they are empty."""
        reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        told_reasoning = reasoning if self._body.tells_reasoning else ""
        said: dict[str, Any] = {
            "content": "".join(piece.text for piece in pieces if piece.kind == "content"),
            "reasoning_content": told_reasoning,
            "reasoning": told_reasoning,
            "tool_calls": self._calls[index].of(pieces),
        }
        return ChatDelta(**{name: value for name, value in said.items() if value})

    def _logprobs_body(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(
            content=logprob_bodies(
                entries,
                self._llm.token_bytes,
                as_ids=bool(self._body.return_tokens_as_token_ids),
            ),
            refusal=None,
        )


def _choice(
    index: int,
    delta: ChatDelta,
    *,
    logprobs: ChatLogprobs | None = None,
    finish_reason: str | None = None,
    token_ids: list[int] | None = None,
) -> ChatChunkChoice:
    told = {} if token_ids is None else {"token_ids": token_ids}
    return ChatChunkChoice(
        index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason, **told
    )
