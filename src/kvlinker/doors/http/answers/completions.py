"""POST /v1/completions: texts, token ids, or parts of text and context caches to be continued; no
chat template. Prompts in all these forms are here for all routes that take one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Discriminator, Field, Tag

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import Delta, PromptLogprobs, TokenLogprob
from kvlinker.base.types.limits import MAX_CHOICES, MOST_PARTS
from kvlinker.base.types.messages import (
    CachedPart,
    CompletionPrompt,
    ContextCacheReference,
    MarkedText,
    TokenIds,
)
from kvlinker.doors.http.answers.answering import (
    CompletionAnswer,
    UsageBody,
    completion_responses,
    respond,
)
from kvlinker.doors.http.answers.chat import Part, content_of
from kvlinker.doors.http.answers.link_bodies import LinkBody
from kvlinker.doors.http.answers.logprobs import (
    PromptLogprobsBody,
    TextOffsets,
    finite,
    prompt_logprobs_body,
    scored_tokens,
    token_key,
)
from kvlinker.doors.http.edge.errors import blaming
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.bodies import (
    ResponseBody,
    Text,
)
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.generation import SamplingBody
from kvlinker.doors.http.models import BodyRoute, ServedModelParam
from kvlinker.engines.contract.contract import Finished
from kvlinker.llm import LLM, Answer, Prompt
from kvlinker.prompting.answer_forms.reader import PlainReader
from kvlinker.service.reading.reader import PreparedRequest

router = APIRouter(tags=["completions"], route_class=BodyRoute)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for ``max_tokens``."""

_Tokens = Annotated[list[int], Field(min_length=1)]


def prompt_kind(value: Any) -> str | None:
    """Return the tag of the form that a prompt, or another input of texts and tokens, has; None for
    none."""
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
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES), Tag("<texts>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_CHOICES), Tag("<token lists>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS), Tag("<parts>")],
    Discriminator(
        prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, token ids, a list of these, or a list of parts",
    ),
]


def prompts_of(body: PromptBody) -> list[CompletionPrompt[CachedPart]]:
    """Return the prompts as the library takes them: one, unless it is a list of texts or a list of
    lists of token ids."""
    if isinstance(body, str):
        return [(body,)]
    if has_several(body):
        return [
            (one,) if isinstance(one, str) else TokenIds(tuple(cast(list[int], one)))
            for one in body
        ]
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
    """A prompt to continue. Each of several prompts gets n choices, in order."""

    place: ClassVar[Place | None] = Place.COMPLETIONS

    prompt: PromptBody
    max_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool | None = Field(
        default=None, description="False to leave out what the tokenizer adds around a text."
    )
    echo: bool | None = Field(default=None, description="Put the prompt before its continuation.")

    def check(self) -> None:
        super().check()
        choices = (len(self.prompt) if has_several(self.prompt) else 1) * self.choices
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"'prompt' and 'n' ask for {choices} choices; at most {MAX_CHOICES} are given in"
                " one request.",
                param="n",
            )
        if self.linking.explain and has_several(self.prompt):
            raise InvalidRequestError(
                "One prompt is explained at a time: send them one by one, or leave out"
                " 'link.explain'.",
                param="link.explain",
            )
        if self.echo and self.stream and self.logprobs is not None:
            raise InvalidRequestError(
                "Streams have no 'logprobs' of an 'echo'. Leave one of them out.", param="echo"
            )

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given, by name."""
        given = super().sampling_fields()
        given["max_tokens"] = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return given


class CompletionLogprobs(ResponseBody):
    """One entry per token, the token that ended the answer included. ``top_logprobs`` are by token,
    and ``text_offset`` counts characters from the choice's beginning. A token that is a part of a
    character is written as its bytes, ``bytes:\\xe2\\x80``. Null stands for tokens of an echoed
    prompt that have no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    """A continuation, or a piece of one. ``finish_reason`` is ``stop``, ``length`` or
    ``cancelled``, and null in all pieces before the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobsBody | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(ResponseBody):
    """A piece of a streamed answer. ``usage`` is present with ``stream_options.include_usage``, and
    null in all pieces before the last. ``link`` is in the first piece, where the prompt has chunks,
    and again in the last one if the request asks for an explanation."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None
    link: LinkBody | None = None


class Completion(CompletionChunk):
    """The whole answer. ``link`` is present where the prompt has chunks."""

    usage: UsageBody


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=completion_responses(CompletionChunk.__name__),
)
async def create_completion(
    body: CompletionRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Continue a text, token ids, or parts of text and context caches; no chat template."""
    served.check_model(body.model)
    served.report_ignored(body, request.scope)
    given = prompts_of(body.prompt)
    link = body.linking

    def build() -> PreparedRequest:
        built = {}
        for index, prompt in enumerate(given):
            field = f"prompt.{index}" if has_several(body.prompt) else "prompt"
            with blaming(field):
                built[field] = served.llm.read_completion(
                    prompt,
                    policy=link.policy,
                    implicit=link.implicit,
                    special_tokens=body.add_special_tokens is not False,
                    salt=body.cache_salt,
                    order=link.order or "given",
                    tenant=tenant,
                )
        sampling = served.llm.sampling_params(**body.sampling_fields())
        keep = body.keep_request(served.llm, PlainReader)
        return PreparedRequest(
            built, sampling, tenant, bool(link.explain), bool(link.attention), keep, link.step
        )

    return await respond(
        served,
        request,
        build,
        TextAnswer(served.llm, body, given),
        n=body.choices,
        stream=bool(body.stream),
    )


class TextAnswer(CompletionAnswer):
    """Continuations of prompts."""

    _body: CompletionRequest

    def __init__(
        self, llm: LLM, body: CompletionRequest, prompts: Sequence[CompletionPrompt[CachedPart]]
    ) -> None:
        super().__init__(llm, body, "cmpl")
        self._head["object"] = "text_completion"
        self._untold = set(range(MAX_CHOICES))  # choices whose prompts were not sent yet
        self._given = prompts
        self._offsets: dict[int, TextOffsets] = {}

    def opening(self, index: int) -> CompletionChoice | None:
        return self._choice(index, self._echo(index), (), None) if self._body.echo else None

    def delta(self, index: int, delta: Delta) -> CompletionChoice | None:
        if not (delta.text or delta.logprobs or self._body.return_token_ids):
            return None
        return self._choice(index, delta.text, delta.logprobs, None, delta.token_ids)

    def closing(self, index: int, finished: Finished) -> CompletionChoice:
        return self._choice(index, "", (), finished.reason)

    def chunk(self, choices: Sequence[CompletionChoice]) -> CompletionChunk:
        return CompletionChunk(**self._head, choices=list(choices))

    def answer(self, answers: Sequence[Answer], usage: UsageBody) -> Completion:
        choices = []
        for index, answer in enumerate(answers):
            text, scored = answer.text, answer.prompt_logprobs
            echoed: Sequence[TokenLogprob] = ()
            if self._body.echo:
                text = self._echo(index) + text
                echoed = self._prompt_entries(index, scored)
            choice = self._choice(
                index,
                text,
                answer.logprobs,
                answer.finish_reason,
                answer.token_ids,
                echoed=echoed,
            )
            if (most := self._body.prompt_logprobs) is not None:
                scores = prompt_logprobs_body(
                    self._prompt(index), scored, self._llm.token_text, most=most
                )
                choice = choice.model_copy(update={"prompt_logprobs": scores})
            choices.append(choice)
        return Completion(**self._head, choices=choices, usage=usage)

    def _prompt(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self._prompts[index // self._body.choices]

    def _echo(self, index: int) -> str:
        """Return the text of a choice's prompt, as it was given, or decoded where that was not text
        alone."""
        given = self._given[index // self._body.choices]
        if self._is_text(index) and not isinstance(given, TokenIds):
            return "".join(
                part.text if isinstance(part, MarkedText) else cast(str, part) for part in given
            )
        return self._llm.text_of(self._prompt(index))

    def _is_text(self, index: int) -> bool:
        """Return whether a choice's prompt was given as text alone."""
        given = self._given[index // self._body.choices]
        return not isinstance(given, TokenIds) and not any(
            isinstance(part, ContextCacheReference) for part in given
        )

    def _prompt_entries(self, index: int, scored: PromptLogprobs | None) -> list[TokenLogprob]:
        """Return an entry for each token of a choice's prompt, without a log probability (NaN)
        where none is known."""
        prompt = self._prompt(index)
        text_of = self._llm.token_text
        entries = scored_tokens(prompt, scored, text_of, most=self._body.logprobs)
        return [
            TokenLogprob(token, text_of(token), math.nan) if entry is None else entry
            for token, entry in zip(prompt.tokens.tolist(), entries, strict=True)
        ]

    def _choice(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenLogprob],
        finish_reason: str | None,
        token_ids: Sequence[int] = (),
        *,
        echoed: Sequence[TokenLogprob] = (),
    ) -> CompletionChoice:
        """Return a choice, or a piece of one; ``echoed`` are the log probabilities of its
        prompt."""
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told["token_ids"] = list(token_ids)
            if index in self._untold:
                told["prompt_token_ids"] = self._prompt(index).tokens.tolist()
                self._untold.discard(index)
        logprobs = None
        if self._body.logprobs is not None:
            offsets = self._prompt_offsets(index, echoed) if echoed else []
            offsets += [self._answer_offsets(index).add(entry) for entry in entries]
            logprobs = self._logprobs_body([*echoed, *entries], offsets)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason, **told
        )

    def _prompt_offsets(self, index: int, entries: Sequence[TokenLogprob]) -> list[int]:
        """Return where the tokens of a choice's prompt begin in its echo. A special token that the
        tokenizer adds in front is no part of a text that was given."""
        echo, is_text = self._echo(index), self._is_text(index)
        offsets = TextOffsets(self._llm.tokenizer, skips_special=not is_text)
        begins = [offsets.add(entry) for entry in entries]
        added = entries[0].text if is_text and not echo.startswith(entries[0].text) else ""
        return [max(0, begin - len(added)) for begin in begins]

    def _answer_offsets(self, index: int) -> TextOffsets:
        """Return what counts the characters of a choice, those of its echo included."""
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self._llm.tokenizer,
                skips_special=self._body.skip_special_tokens is not False,
                start=len(self._echo(index)) if self._body.echo else 0,
            )
        return self._offsets[index]

    def _logprobs_body(
        self, entries: Sequence[TokenLogprob], offsets: list[int]
    ) -> CompletionLogprobs:
        def name(entry: TokenLogprob) -> str:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            return token_key(entry, self._llm.token_bytes, as_ids=as_ids)

        return CompletionLogprobs(
            tokens=[name(entry) for entry in entries],
            token_logprobs=[_json_logprob(entry) for entry in entries],
            top_logprobs=[
                (
                    None
                    if math.isnan(entry.logprob)
                    else {name(one): finite(one.logprob) for one in (entry, *entry.top)}
                )
                for entry in entries
            ],
            text_offset=offsets,
        )


def _json_logprob(entry: TokenLogprob) -> float | None:
    return None if math.isnan(entry.logprob) else finite(entry.logprob)
