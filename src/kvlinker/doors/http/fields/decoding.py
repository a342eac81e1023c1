"""Fields by which all generating requests control decoding: how tokens are drawn, which are
forbidden or favoured, which form the answer has, and where it ends.

They are OpenAI's and vLLM's, and become ``SamplingParams``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.limits import (
    MOST_BIASED,
    MOST_ENDINGS,
    MOST_GRAMMAR_CHOICES,
    MOST_STOPS,
)
from kvlinker.base.types.sampling import MOST_BIAS
from kvlinker.doors.http.fields.bodies import (
    JsonObject,
    RequestBody,
    Text,
    TokenId,
    Unicode,
    is_given,
    is_true,
    where,
)
from kvlinker.doors.http.fields.foreign import Place

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024), Unicode]

_Stop = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]

_Seed = Annotated[
    int, Field(ge=-(2**63), le=2**63 - 1), WithJsonSchema({"type": "integer", "format": "int64"})
]
"""Its bounds are no doubles, which are what an OpenAPI document has."""

_TokenName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
_LogitBias = Annotated[
    dict[_TokenName, _Bias],
    Field(max_length=MOST_BIASED, json_schema_extra={"additionalProperties": False}),
]
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

_ASKING = frozenset(
    {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
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

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        where({"type": {"const": "json_schema"}}, is_given("json_schema")),
        where(
            {"type": {"not": {"const": "json_schema"}}},
            {"properties": {"json_schema": {"type": "null"}}},
        ),
        where(
            {"type": {"not": {"const": "json_object"}}},
            {"properties": {"schema": {"type": "null"}}},
        ),
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    schema_: JsonObject | None = Field(
        default=None, alias="schema", description="Of a `json_object`: what it is valid under."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormatBody:
        if (self.json_schema is None) == (self.type == "json_schema"):
            wrong = "needs" if self.json_schema is None else "takes no"
            raise InvalidRequestError(
                f"Type {self.type!r} {wrong} 'json_schema'.", param="response_format.json_schema"
            )
        if self.schema_ is not None and self.type != "json_object":
            raise InvalidRequestError(
                f"Type {self.type!r} takes no 'schema'.", param="response_format.schema"
            )
        return self

    @property
    def grammar(self) -> AnswerGrammar | None:
        """The grammar that the answer is to follow."""
        return AnswerGrammar.response_format(self.model_dump(by_alias=True))


class StructuredOutputsBody(RequestBody):
    """vLLM's ways to say it: one of a JSON schema, a regular expression that the whole answer
    matches, texts of which it is one, a grammar in the notation of Lark or of GBNF, and any JSON
    object."""

    place: ClassVar[Place | None] = Place.STRUCTURED_OUTPUTS
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                *map(is_given, ("json", "regex", "choice", "grammar")),
                is_true("json_object"),
            ],
        }
    )

    json_: _JsonSchema | None = Field(default=None, alias="json")
    regex: _Grammar | None = None
    choice: _Choice | None = None
    grammar: _Grammar | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputsBody:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequestError(
                "Give exactly one of 'json', 'regex', 'choice', 'grammar' and 'json_object'.",
                param="structured_outputs",
            )
        return self

    def answer_grammar(self) -> AnswerGrammar:
        """Return the grammar that the answer is to follow."""
        param = "structured_outputs"
        if self.json_object:
            return AnswerGrammar.json_object(param=param)
        return _grammar(f"{param}.", self.json_, self.regex, self.choice, self.grammar)


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
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_ENDINGS)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MOST_ENDINGS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = Field(
        default=None, description="The only tokens that may be generated."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="False to show special tokens in the text."
    )
    include_stop_str_in_output: bool | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> DecodingFields:
        self.structured_form()
        return self

    def structured_form(self) -> str | None:
        """Return the name of the field that asks for a form; None if none does. Raises
        InvalidRequestError for several."""
        given = [name for name in sorted(_ASKING) if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                f"{given[0]!r} and {given[1]!r} both ask for a form: give one of them.",
                param=given[1],
            )
        return given[0] if given else None

    def structured_grammar(self) -> AnswerGrammar | None:
        """Return the grammar that the answer is to follow; None if none is asked for."""
        if self.structured_outputs is not None:
            return self.structured_outputs.answer_grammar()
        if self.structured_form() is None:
            return None
        return _grammar(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
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


def _grammar(
    prefix: str,
    json_: dict[str, JsonValue] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> AnswerGrammar:
    """Return the grammar of the one of these that is given; ``prefix`` stands before its name in
    the request."""
    if isinstance(json_, dict):
        return AnswerGrammar.json_schema(json_, param=f"{prefix}json")
    if json_ is not None:
        return AnswerGrammar("json", json_, f"{prefix}json")
    if choice is not None:
        return AnswerGrammar.choice(choice, param=f"{prefix}choice")
    if regex is not None:
        return AnswerGrammar("regex", regex, f"{prefix}regex")
    assert grammar is not None
    return AnswerGrammar("grammar", grammar, f"{prefix}grammar")


def answer_grammar(
    response_format: ResponseFormatBody | None, structured: DecodingFields
) -> AnswerGrammar | None:
    """Return the grammar that a request asks for. Raises InvalidRequestError if several fields ask
    for one."""
    asked = None if response_format is None else response_format.grammar
    form = structured.structured_form()
    if asked is not None and form is not None:
        raise InvalidRequestError(
            f"'response_format' and {form!r} both ask for a form: give one of them.", param=form
        )
    return asked or structured.structured_grammar()
