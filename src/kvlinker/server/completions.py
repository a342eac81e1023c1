"""POST /v1/completions: texts, token ids, or parts of text and context caches to be continued; no chat template."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.llm import Answer, ReadPrompt
from kvlinker.server.access import TenantParam
from kvlinker.server.answering import LinkBody, UsageBody, completion_responses, finite, respond
from kvlinker.server.bodies import MAX_CHOICES, Part, ResponseBody, SamplingBody, Text, content_of
from kvlinker.server.errors import blaming
from kvlinker.server.models import ServiceParam
from kvlinker.types.answers import Delta, Finished, TokenLogprob
from kvlinker.types.messages import CachedPart, CompletionPrompt, TokenIds
from kvlinker.types.sampling import SamplingParams

router = APIRouter(tags=["completions"])

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for ``max_tokens``."""

_Tokens = Annotated[list[int], Field(min_length=1)]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "<texts>"
    if isinstance(first, list):
        return "<token lists>"
    return "<parts>" if isinstance(first, dict | BaseModel) else "<tokens>"


PromptBody = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1), Tag("<texts>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Tokens], Tag("<token lists>")]
    | Annotated[list[Part], Tag("<parts>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, token ids, a list of these, or a list of parts",
    ),
]


def prompts_of(body: PromptBody) -> list[CompletionPrompt[CachedPart]]:
    """Return the prompts as the library takes them: one, unless it is a list of texts or a list of lists of token
    ids."""
    if isinstance(body, str):
        return [(body,)]
    if has_several(body):
        return [(one,) if isinstance(one, str) else TokenIds(tuple(cast(list[int], one))) for one in body]
    if isinstance(body[0], int):
        return [TokenIds(tuple(body))]
    return [content_of(cast(list[Part], body))]


def has_several(body: PromptBody) -> bool:
    """Return whether the body is a list of prompts, which may hold only one."""
    return isinstance(body, list) and isinstance(body[0], str | list)


def single_prompt(body: PromptBody) -> CompletionPrompt[CachedPart]:
    """Return the prompt of a body that takes only one. Raises InvalidRequestError for several."""
    if has_several(body) and len(body) > 1:
        raise InvalidRequestError("'prompt' must be one prompt here.", param="prompt")
    return prompts_of(body)[0]


class CompletionRequest(SamplingBody):
    """A prompt to continue. Several prompts give n choices each, in order."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = SamplingBody.refused | {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: PromptBody
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        choices = (len(self.prompt) if has_several(self.prompt) else 1) * self.choices
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"'prompt' and 'n' ask for {choices} choices; at most {MAX_CHOICES} are given in one request.",
                param="n",
            )
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters."""
        return self.sampling(max_tokens=self.max_tokens or DEFAULT_MAX_TOKENS, logprobs=self.logprobs)


class CompletionLogprobs(ResponseBody):
    """One entry per token; ``top_logprobs`` by token, ``text_offset`` in characters from the choice's beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    """A continuation, or a piece of one; ``finish_reason`` is ``stop``, ``length`` or ``cancelled``, null before."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(ResponseBody):
    """The whole answer; ``link`` is there where chunks took part."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    link: LinkBody | None = None


class CompletionChunk(ResponseBody):
    """A piece of a streamed answer; ``usage`` is there with ``stream_options.include_usage``, null but in the last;
    ``link`` is in the first, where chunks took part."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    link: LinkBody | None = None


@router.post("/v1/completions", response_model=Completion, responses=completion_responses(CompletionChunk.__name__))
async def create_completion(
    body: CompletionRequest, request: Request, service: ServiceParam, tenant: TenantParam
) -> Response:
    """Continue a text, token ids, or parts of text and context caches; no chat template."""
    service.check_model(body.model)
    answer_format = CompletionFormat(service.llm.model_name, logprobs=body.logprobs is not None)

    def build() -> dict[str, ReadPrompt]:
        built = {}
        for index, prompt in enumerate(prompts_of(body.prompt)):
            field = f"prompt.{index}" if has_several(body.prompt) else "prompt"
            with blaming(field):
                built[field] = service.llm.read_completion(
                    prompt, policy=body.policy, implicit=body.implicit, tenant=tenant
                )
        return built

    return await respond(service, request, body, build, body.sampling_params(), answer_format, tenant=tenant)


class CompletionFormat:
    """An ``AnswerFormat``."""

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, delta: Delta) -> CompletionChoice:
        return self._choice(index, delta.text, delta.logprobs, None)

    def closing(self, index: int, finished: Finished) -> CompletionChoice:
        return self._choice(index, "", (), finished.reason)

    def chunk(self, choices: Sequence[CompletionChoice]) -> CompletionChunk:
        return CompletionChunk(**self._head, choices=list(choices))

    def answer(self, answers: Sequence[Answer], usage: UsageBody) -> Completion:
        choices = [
            self._choice(index, answer.text, answer.logprobs, answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return Completion(**self._head, choices=choices, usage=usage)

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenLogprob], finish_reason: str | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index, text=text, logprobs=self._logprobs_body(index, entries), finish_reason=finish_reason
        )

    def _logprobs_body(self, index: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        """Return the log probabilities' body. Offsets count the characters of all tokens of the choice before, over all
        chunks."""
        if not self._logprobs:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(entry.text)
        return CompletionLogprobs(
            tokens=[entry.text for entry in entries],
            token_logprobs=[finite(entry.logprob) for entry in entries],
            top_logprobs=[{one.text: finite(one.logprob) for one in (entry, *entry.top)} for entry in entries],
            text_offset=offsets,
        )
