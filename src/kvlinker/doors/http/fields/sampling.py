"""Fields of all generating requests: sampling, linking and streaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MAX_CHOICES
from kvlinker.doors.http.fields.bodies import (
    OR_LEFT_OUT,
    RequestBody,
    Text,
    Unicode,
    exactly_one,
    is_given,
    is_true,
    where,
)
from kvlinker.doors.http.fields.decoding import DecodingFields, ResponseFormatBody, answer_grammar
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.parts import MarkTtl
from kvlinker.llm import LLM
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.marks import ttl_seconds
from kvlinker.service.agents.workflows import (
    LONGEST_WORKFLOW,
    MOST_EXPECTED,
    MOST_NODES,
    MOST_SECONDS,
    MOST_STEPS,
    NextUse,
    WorkflowStep,
)
from kvlinker.service.context_caches.kept_answers import KeepRequest


class NextUseBody(RequestBody):
    """Context caches that a workflow will use in ``steps`` requests of its own, counted from this
    one, or in ``seconds``."""

    refuses_unknown: ClassVar[bool] = True

    model_config = exactly_one("steps", "seconds")

    ids: list[Text] = Field(min_length=1, max_length=MOST_EXPECTED)
    steps: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    seconds: float | None = Field(default=None, ge=0, le=MOST_SECONDS)

    @model_validator(mode="after")
    def _check_time(self) -> NextUseBody:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidRequestError(
                "Give exactly one of 'steps' and 'seconds'.", param="link.next"
            )
        return self


class LinkOptions(RequestBody):
    """Options of linking cached chunks; ``policy`` such as ``legolink-16``. ``implicit`` says which
    texts become chunks without an id. With ``explain``, the answer explains how its prompt was
    linked, and with ``attention`` shows the question's attention in each layer. ``keep`` makes a
    context cache of the answer's text, or of ``all`` of it, reasoning and calls included, that
    lives ``ttl`` from its last use: "5m", "1h". In ``order`` ``any``, documents, and neighbouring
    chunks, may be reordered as they were linked before. ``workflow`` is the name of the request's
    workflow, and ``next`` lists the context caches that it will use."""

    refuses_unknown: ClassVar[bool] = True

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        where({"next": {"type": "array"}}, is_given("workflow")),
    )

    policy: Annotated[str, StringConstraints(min_length=1), Unicode] | None = None
    implicit: Literal["structure", "auto", "marked", "off"] | None = None
    explain: bool | None = None
    attention: bool | None = None
    keep: Literal["answer", "all", "off"] | None = None
    ttl: MarkTtl | None = None
    order: Literal["given", "any"] | None = None
    workflow: (
        Annotated[
            str,
            StringConstraints(min_length=1, max_length=LONGEST_WORKFLOW, pattern=r"^[^\x00]*$"),
            Unicode,
        ]
        | None
    ) = None
    next: list[NextUseBody] | None = Field(default=None, max_length=MOST_NODES)

    @model_validator(mode="after")
    def _check_workflow(self) -> LinkOptions:
        if self.next is not None and self.workflow is None:
            raise InvalidRequestError("'link.next' needs a 'link.workflow'.", param="link.next")
        return self

    @property
    def step(self) -> WorkflowStep | None:
        """The step of a workflow that the request is, if it is one. Raises
        InvalidRequestError."""
        if self.workflow is None:
            return None
        if self.next is None:
            return WorkflowStep(self.workflow)
        uses = [NextUse(tuple(use.ids), use.steps, use.seconds) for use in self.next]
        return WorkflowStep(self.workflow, tuple(uses))


NO_LINK_OPTIONS = LinkOptions()

CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=1024), Unicode]
"""Reuse of earlier requests is limited to those with the same salt."""

RequestId = Annotated[str, StringConstraints(min_length=1, max_length=256), Unicode]
"""The caller's own name for a request, which the id of its answer has in it."""

ServiceTier = Annotated[Literal["auto", "default", "flex"], OR_LEFT_OUT]


class StreamOptions(RequestBody):
    """``include_usage``: end the stream with a chunk that holds the usage.
    ``continuous_usage_stats``: all chunks hold the usage so far."""

    place: ClassVar[Place | None] = Place.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


ATTENTION_IS_EXPLAINED = where(
    {"link": is_true("attention")},
    {"properties": {"link": is_true("explain")}},
)
"""The rule that ``link.attention`` needs ``link.explain``."""


NOTHING_EXPLAINED: dict[str, JsonValue] = {
    "properties": {
        "link": {"properties": {name: {"enum": [None, False]} for name in ("explain", "attention")}}
    }
}
"""The rule of routes whose answers have no explanation."""


def _limited(value: Any) -> Any:
    """Take -1, by which other servers' clients say that there is no limit."""
    return None if value == -1 and not isinstance(value, bool) else value


_LIMIT = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}

MostTokens = Annotated[
    Annotated[int, Field(ge=1, le=2**31 - 1)] | None,
    BeforeValidator(_limited),
    WithJsonSchema({"anyOf": [_LIMIT, {"const": -1}, {"type": "null"}]}),
]
"""The longest answer in tokens; -1 is as good as null."""


class SamplingBody(DecodingFields):
    """Fields that chat completions and completions share. Absent and null mean the default."""

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        {
            "if": is_true("stream"),
            "then": {"properties": {"prompt_logprobs": {"type": "null"}}},
            "else": {"properties": {"stream_options": {"type": "null"}}},
        },
        ATTENTION_IS_EXPLAINED,
    )

    model: Text | None = None
    link: LinkOptions | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: MostTokens = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    response_format: ResponseFormatBody | None = None
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="The alternatives to return for each prompt token; not with `stream`.",
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Tokens of log probabilities are `token_id:5`."
    )

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> SamplingBody:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "Streams have no 'prompt_logprobs'. Leave one of them out.", param="prompt_logprobs"
            )
        return self

    def sampling_fields(self) -> dict[str, Any]:
        """Return the set fields of ``SamplingParams`` by name, without ``max_tokens`` and
        ``logprobs``."""
        given = super().sampling_fields()
        if self.prompt_logprobs is not None:
            given["prompt_logprobs"] = self.prompt_logprobs
        if grammar := answer_grammar(self.response_format, self):
            given["grammar"] = grammar
        return given

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "'stream_options' needs 'stream' to be true.", param="stream_options"
            )
        return self

    @model_validator(mode="after")
    def _check_explanation(self) -> SamplingBody:
        if self.linking.attention and not self.linking.explain:
            raise InvalidRequestError(
                "'link.attention' is a part of an explanation: it needs 'link.explain' to be true.",
                param="link.attention",
            )
        return self

    def keep_request(self, llm: LLM, reader: Callable[[], Reader]) -> KeepRequest | None:
        """Return the part of the first answer to keep, which ``reader`` makes readers for; None for
        nothing. Where the request does not say, the server's setting does."""
        part, ttl = self.linking.keep or llm.settings.keep_answers, self.linking.ttl
        if part == "off" and ttl is None:
            return None
        return KeepRequest.of(part, None if ttl is None else ttl_seconds(ttl), reader)

    @property
    def linking(self) -> LinkOptions:
        """The options of linking, which are all None where there are none."""
        return self.link or NO_LINK_OPTIONS

    @property
    def choices(self) -> int:
        """The number of choices that are asked for, of each prompt."""
        return self.n or 1
