"""Fields by which all generating requests control their answers: the form, sampling and stopping,
reasoning, linking, and streaming.

They are OpenAI's and vLLM's, and become ``SamplingParams``. Fields for more or less reasoning are
wishes: clients send them to any model, and those without effect are named in the answer's headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar, GrammarKind
from kvlinker.base.types.limits import (
    MAX_CHOICES,
    MOST_BIASED,
    MOST_ENDINGS,
    MOST_GRAMMAR_CHOICES,
    MOST_STOPS,
)
from kvlinker.base.types.sampling import MOST_BIAS
from kvlinker.doors.http.fields.bodies import (
    OR_LEFT_OUT,
    JsonObject,
    MarkTtl,
    RequestBody,
    Text,
    Unicode,
)
from kvlinker.doors.http.fields.foreign import Place
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

T = TypeVar("T")

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024), Unicode]

_Stop = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]

_Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

_TokenName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
_LogitBias = Annotated[dict[_TokenName, _Bias], Field(max_length=MOST_BIASED)]
_BadWord = Annotated[str, StringConstraints(min_length=1, max_length=256), Unicode]

_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

_Grammar = Annotated[str, StringConstraints(min_length=1), Unicode]
_JsonSchema = Annotated[
    Annotated[JsonObject, Tag("<schema>")] | Annotated[_Grammar, Tag("<text>")],
    Discriminator(lambda value: "<schema>" if isinstance(value, dict) else "<text>"),
]


_Choice = Annotated[list[_Grammar], Field(min_length=1, max_length=MOST_GRAMMAR_CHOICES)]

_FORMS = ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs")
"""The fields that ask for a form in vLLM's words."""


class JsonSchemaBody(RequestBody):
    """A JSON schema with a name. It is enforced with and without ``strict``; a schema that cannot
    be is refused."""

    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormatBody(RequestBody):
    """The form of the answer: any text, a JSON object, or JSON that is valid under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    schema_: JsonObject | None = Field(
        default=None, alias="schema", description="Of a `json_object`: what it is valid under."
    )

    def check(self) -> None:
        if (self.json_schema is None) == (self.type == "json_schema"):
            wrong = "needs" if self.json_schema is None else "takes no"
            raise InvalidRequestError(
                f"Type {self.type!r} {wrong} 'json_schema'.", param="response_format.json_schema"
            )
        if self.schema_ is not None and self.type != "json_object":
            raise InvalidRequestError(
                f"Type {self.type!r} takes no 'schema'.", param="response_format.schema"
            )

    @property
    def grammar(self) -> AnswerGrammar | None:
        """The grammar that the answer is to follow."""
        return AnswerGrammar.response_format(self.model_dump(by_alias=True))


class StructuredOutputsBody(RequestBody):
    """vLLM's ways to say it: one of a JSON schema, a regular expression that the whole answer
    matches, texts of which it is one, a grammar in the notation of Lark or of GBNF, and any JSON
    object."""

    place: ClassVar[Place | None] = Place.STRUCTURED_OUTPUTS

    json_: _JsonSchema | None = Field(default=None, alias="json")
    regex: _Grammar | None = None
    choice: _Choice | None = None
    grammar: _Grammar | None = None
    json_object: bool | None = None

    def check(self) -> None:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequestError(
                "Give exactly one of 'json', 'regex', 'choice', 'grammar' and 'json_object'.",
                param="structured_outputs",
            )


def _grammar_of(name: str, value: Any) -> AnswerGrammar:
    """Return the grammar that a field of vLLM's asks for."""
    if isinstance(value, StructuredOutputsBody):
        if value.json_object:
            return AnswerGrammar.json_object(param=name)
        kinds: dict[GrammarKind, Any] = {
            "json": value.json_,
            "regex": value.regex,
            "choice": value.choice,
            "grammar": value.grammar,
        }
        kind, value = next((kind, each) for kind, each in kinds.items() if each is not None)
        name = f"{name}.{kind}"
    else:
        kind = cast(GrammarKind, name.removeprefix("guided_"))
    if isinstance(value, dict):
        return AnswerGrammar.json_schema(value, param=name)
    if isinstance(value, list):
        return AnswerGrammar.choice(value, param=name)
    return AnswerGrammar(kind, value, name)


class DecodingFields(RequestBody):
    """Fields of the answer's form in vLLM's words, new and old, of which only one may be given, and
    of sampling and stopping. Absent and null mean the default."""

    structured_outputs: StructuredOutputsBody | None = None
    guided_json: _JsonSchema | None = None
    guided_regex: _Grammar | None = None
    guided_choice: _Choice | None = None
    guided_grammar: _Grammar | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="-1 and 0 are off.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: _Seed | None = None
    stop: _Stop | None = None
    ignore_eos: bool | None = None
    logit_bias: _LogitBias | None = Field(
        default=None, description="By token id, numbers that are added to logits."
    )
    min_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_ENDINGS)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MOST_ENDINGS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = Field(
        default=None, description="The only tokens that may be generated."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="False to show special tokens in the text."
    )
    include_stop_str_in_output: bool | None = None

    def check(self) -> None:
        asking = [name for name in _FORMS if getattr(self, name) is not None]
        if len(asking) > 1:
            raise InvalidRequestError(
                f"{asking[0]!r} and {asking[1]!r} both ask for a form: give one of them.",
                param=asking[1],
            )

    def sampling_fields(self) -> dict[str, Any]:
        """Return the set fields of ``SamplingParams`` by name, without grammars, limits and log
        probabilities."""
        given = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given


SWITCH_VARIABLE = "enable_thinking"
"""The variable by which chat templates turn reasoning on and off, of models that can do without."""

EFFORT_VARIABLE = "reasoning_effort"
"""The variable by which chat templates ask for more or less reasoning."""

Effort = Annotated[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], OR_LEFT_OUT]
Verbosity = Annotated[Literal["low", "medium", "high"], OR_LEFT_OUT]

_Summary = Annotated[Literal["auto", "concise", "detailed"], OR_LEFT_OUT]
_Display = Annotated[Literal["summarized", "omitted"], OR_LEFT_OUT]
"""There are no summaries: reasoning is sent as it is, or left out."""


class ReasoningBody(RequestBody):
    """How much the model is to reason. Any ``effort`` but ``none``, and a limit, turn reasoning on,
    where the chat template can. ``max_tokens`` ends it. There are no summaries."""

    effort: Effort | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    summary: _Summary | None = None
    generate_summary: _Summary | None = None


class ThinkingBody(RequestBody):
    """Says whether the model is to reason; ``disabled`` counts for those that can do without."""

    type: Literal["adaptive", "disabled"]
    display: _Display | None = None


class ThinkingBudget(RequestBody):
    """Asks for reasoning of at most ``budget_tokens`` tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=2**31 - 1)
    display: _Display | None = None


_Thinking = Annotated[
    Annotated[ThinkingBody, Tag("<usual>")] | Annotated[ThinkingBudget, Tag("<enabled>")],
    Discriminator(
        lambda value: (
            "<enabled>"
            if isinstance(value, ThinkingBudget)
            or (isinstance(value, dict) and value.get("type") == "enabled")
            else "<usual>"
        )
    ),
]


class ReasoningEffect(NamedTuple):
    """The effect of a request's fields with one model."""

    variables: Mapping[str, Any]
    """The variables that they set in the chat template."""

    limit: int | None
    """The most tokens of reasoning; None for any number."""

    ignored: tuple[str, ...]
    """The paths of those that have no effect."""


NO_EFFECT = ReasoningEffect(MappingProxyType({}), None, ())


class ReasoningFields(RequestBody):
    """Fields of all conversations for how much the model reasons and writes. Fields without effect
    are named in a header."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningBody | None = None
    thinking: _Thinking | None = None
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="As `reasoning.max_tokens`; -1 is off."
    )
    include_reasoning: bool | None = Field(
        default=None, description="False to leave reasoning out of the answer."
    )
    verbosity: Verbosity | None = None
    chat_template_kwargs: JsonObject | None = Field(
        default=None,
        description="Variables of the model's chat template, such as `enable_thinking`.",
    )

    @property
    def tells_reasoning(self) -> bool:
        """True if the answer is to have the reasoning in it."""
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        return self.include_reasoning is not False and not omitted

    def reasoning_effect(self, llm: LLM) -> ReasoningEffect:
        """Return the effect of the fields with this model. Of two efforts, or limits, that in
        ``reasoning`` counts; the template's own variables count before them."""
        if self.model_fields_set.isdisjoint(ReasoningFields.model_fields):
            return NO_EFFECT  # of most requests
        asked = self.reasoning or ReasoningBody()
        form = llm.answer_form
        off = isinstance(self.thinking, ThinkingBody) and self.thinking.type == "disabled"
        wanted: dict[str, str | None] = {
            "reasoning.effort": asked.effort,
            "thinking.type": "none" if off else None,
            "reasoning_effort": self.reasoning_effort,
        }
        efforts = _without_none(wanted)
        effort = next(iter(efforts.values()), None)
        budget = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingBudget) else None
        limits = _without_none(
            {
                "reasoning.max_tokens": asked.max_tokens,
                "thinking.budget_tokens": budget,
                "thinking_token_budget": (
                    None if self.thinking_token_budget == -1 else self.thinking_token_budget
                ),
            }
        )
        limit = next(iter(limits.values()), None) if form.can_limit_reasoning else None
        values: dict[str, Any] = {}
        if effort is not None or limits:
            values[SWITCH_VARIABLE] = effort != "none"
        if effort is not None:
            values[EFFORT_VARIABLE] = effort
        own = self.chat_template_kwargs or {}
        variables = {**values, **own}
        variables = {
            name: value
            for name, value in variables.items()
            if llm.builder.template.has_variable(name)
        }
        is_met = bool(values.keys() & variables.keys()) or (
            effort == "none" and form.reasoning is None
        )
        ignored = [path for path, each in efforts.items() if each != effort or not is_met]
        ignored += [path for path, each in limits.items() if each != limit]
        beside = ("summary", "generate_summary")
        ignored += [f"reasoning.{name}" for name in beside if getattr(asked, name) is not None]
        ignored += [f"chat_template_kwargs.{name}" for name in own if name not in variables]
        if self.verbosity not in (None, "medium"):
            ignored.append("verbosity")
        return ReasoningEffect(variables, limit, tuple(ignored))


def _without_none(values: dict[str, T | None]) -> dict[str, T]:
    """Return the values that are not None."""
    return {path: value for path, value in values.items() if value is not None}


class NextUseBody(RequestBody):
    """Context caches that a workflow will use in ``steps`` requests of its own, counted from this
    one, or in ``seconds``."""

    refuses_unknown: ClassVar[bool] = True

    ids: list[Text] = Field(min_length=1, max_length=MOST_EXPECTED)
    steps: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    seconds: float | None = Field(default=None, ge=0, le=MOST_SECONDS)

    def check(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidRequestError(
                "Give exactly one of 'steps' and 'seconds'.", param="link.next"
            )


class LinkOptions(RequestBody):
    """Options of linking cached chunks; ``policy`` such as ``legolink-16``. ``implicit`` says which
    texts become chunks without an id. With ``explain``, the answer explains how its prompt was
    linked, and with ``attention`` shows the question's attention in each layer. ``keep`` makes a
    context cache of the answer's text, or of ``all`` of it, reasoning and calls included, that
    lives ``ttl`` from its last use: "5m", "1h". In ``order`` ``any``, documents, and neighbouring
    chunks, may be reordered as they were linked before. ``workflow`` is the name of the request's
    workflow, and ``next`` lists the context caches that it will use."""

    refuses_unknown: ClassVar[bool] = True

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

    def check(self) -> None:
        if self.next is not None and self.workflow is None:
            raise InvalidRequestError("'link.next' needs a 'link.workflow'.", param="link.next")

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

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "Streams have no 'prompt_logprobs'. Leave one of them out.", param="prompt_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "'stream_options' needs 'stream' to be true.", param="stream_options"
            )
        if self.link is not None and self.link.attention and not self.link.explain:
            raise InvalidRequestError(
                "'link.attention' is a part of an explanation: it needs 'link.explain' to be true.",
                param="link.attention",
            )

    def grammar(self) -> AnswerGrammar | None:
        """Return the grammar that the answer is to follow; None if no field asks for one. Raises
        InvalidRequestError if several fields do."""
        asked = None if self.response_format is None else self.response_format.grammar
        for name in _FORMS:
            if (value := getattr(self, name)) is not None:
                if asked is not None:
                    raise InvalidRequestError(
                        f"'response_format' and {name!r} both ask for a form: give one of them.",
                        param=name,
                    )
                return _grammar_of(name, value)
        return asked

    def sampling_fields(self) -> dict[str, Any]:
        """Return the set fields of ``SamplingParams`` by name, without ``max_tokens`` and
        ``logprobs``."""
        given = super().sampling_fields()
        if self.prompt_logprobs is not None:
            given["prompt_logprobs"] = self.prompt_logprobs
        if grammar := self.grammar():
            given["grammar"] = grammar
        return given

    def keep_request(self, llm: LLM, reader: Callable[[], Reader]) -> KeepRequest | None:
        """Return the part of the first answer to keep, which ``reader`` makes readers for; None for
        nothing. Where the request does not say, the server's setting does."""
        link = self.linking
        part, ttl = link.keep or llm.settings.keep_answers, link.ttl
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
