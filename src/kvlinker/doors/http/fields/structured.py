"""Fields of both completion routes that ask for answers of a certain form: OpenAI's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    model_validator,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.limits import MOST_GRAMMAR_CHOICES
from kvlinker.doors.http.fields.bodies import (
    JsonObject,
    RequestBody,
    Text,
    Unicode,
    is_given,
    is_true,
    where,
)

_Grammar = Annotated[str, StringConstraints(min_length=1), Unicode]
_JsonSchema = Annotated[
    Annotated[JsonObject, Tag("<schema>")] | Annotated[_Grammar, Tag("<text>")],
    Discriminator(lambda value: "<schema>" if isinstance(value, dict) else "<text>"),
]


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
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormatBody:
        if (self.json_schema is None) == (self.type == "json_schema"):
            wrong = "needs" if self.json_schema is None else "takes no"
            raise InvalidRequestError(
                f"Type {self.type!r} {wrong} 'json_schema'.", param="response_format.json_schema"
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

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                *map(is_given, ("json", "regex", "choice", "grammar")),
                is_true("json_object"),
            ],
        }
    )

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (True, False),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_: _JsonSchema | None = Field(default=None, alias="json")
    regex: _Grammar | None = None
    choice: (
        Annotated[list[_Grammar], Field(min_length=1, max_length=MOST_GRAMMAR_CHOICES)] | None
    ) = None
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
        if isinstance(self.json_, dict):
            return AnswerGrammar.json_schema(self.json_, param=f"{param}.json")
        if self.json_ is not None:
            return AnswerGrammar("json", self.json_, f"{param}.json")
        if self.choice is not None:
            return AnswerGrammar.choice(self.choice, param=f"{param}.choice")
        if self.regex is not None:
            return AnswerGrammar("regex", self.regex, f"{param}.regex")
        if self.grammar is not None:
            return AnswerGrammar("grammar", self.grammar, f"{param}.grammar")
        return AnswerGrammar.json_object(param=param)


def answer_grammar(
    response_format: ResponseFormatBody | None, structured_outputs: StructuredOutputsBody | None
) -> AnswerGrammar | None:
    """Return the grammar that a request asks for. Raises InvalidRequestError where both fields ask
    for one."""
    asked = None if response_format is None else response_format.grammar
    if structured_outputs is None:
        return asked
    if asked is not None:
        raise InvalidRequestError(
            "'response_format' and 'structured_outputs' both ask for a form: give one of them.",
            param="structured_outputs",
        )
    return structured_outputs.answer_grammar()
