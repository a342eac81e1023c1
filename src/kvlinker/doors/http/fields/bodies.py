"""The parts of bodies: strict texts, bounded names and metadata, requests that refuse unknown
fields, and rules for combinations of fields.

Requests are validated by these models and become plain values (``kvlinker.base.types.messages``,
``SamplingParams``); responses are made of them, so that the OpenAPI document describes the bodies
that are sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from fastapi import Depends, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.base.types.context_cache import LONGEST_KEY, LONGEST_NAME, LONGEST_VALUE, MOST_PAIRS
from kvlinker.doors.http.fields.foreign import ForeignFields, Place, foreign_fields


def _require_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON's escapes can spell, but which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "text_unicode", "Input should be valid Unicode, without lone surrogates"
        ) from error
    return text


def _require_unicode_within(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuse the same anywhere in an object, which could not be sent back."""
    _require_unicode(json.dumps(value, ensure_ascii=False))
    return value


Unicode = AfterValidator(_require_unicode)
"""Stands last in the annotation of a text, so that the constraints before it speak of
characters."""

Text = Annotated[str, Unicode]

NonemptyText = Annotated[str, StringConstraints(min_length=1), Unicode]

TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0})]
"""The id of a token; the model's vocabulary is what bounds it, which errors name."""

JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_require_unicode_within)]
"""An object of any content, such as a schema."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME), Unicode]

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=LONGEST_KEY), Unicode],
        Annotated[str, StringConstraints(max_length=LONGEST_VALUE), Unicode],
    ],
    Field(max_length=MOST_PAIRS),
]
"""Pairs of metadata of a context cache."""


class LeftOut(BaseModel):
    """An entry of a list that kvlinker knows nothing to do with, such as a tool that another server
    runs. The request goes on without it, and the answer names it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: NonemptyText


_UNKNOWN_WORD = "unknown_word"


class _OrLeftOut:
    """Stands in the annotation of a word, such as a ``Literal``: another text is left out of its
    body, or its list, and named by the answer."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def meet(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
            try:
                return validate(value)
            except ValidationError:
                if not isinstance(value, str):
                    raise
                raise PydanticCustomError(_UNKNOWN_WORD, "Input is an unknown word") from None

        return no_info_wrap_validator_function(meet, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(core), {"type": "string", "description": "Left out."}]}


OR_LEFT_OUT = _OrLeftOut()


def by_type(*types: str, untyped: str = "other") -> Discriminator:
    """Tell the entries of a list apart by their type: those of ``types`` have bodies of their own,
    others are ``LeftOut``. Entries without a type are of the type ``untyped``."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = untyped if kind is None else kind
        return f"<{kind}>" if kind in types else "<other>"

    return Discriminator(tag)


def other_than(*types: str) -> WithJsonSchema:
    """Return the schema of entries of all types but these, which stands behind ``LeftOut`` where
    those have bodies of their own."""
    return WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"type": "string", "minLength": 1, "not": {"enum": [*types]}}},
            "required": ["type"],
        }
    )


class RequestBody(BaseModel):
    """Base of all request bodies: types are strict, and unknown fields are left out and named by
    the answer (``ignored_paths``). Null means nothing, and such fields are not named. Bodies of
    kvlinker's own, whose fields nobody sends by chance, refuse them.

    The tags of unions are in angle brackets, to distinguish them from the path of an error (see
    ``kvlinker.doors.http.edge.errors``).
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    refuses_unknown: ClassVar[bool] = False
    """True for kvlinker's own bodies: what is unknown there is misspelt."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    """The names of the fields that were left out."""

    place: ClassVar[Place | None] = None
    """The place of the body, by which ``foreign`` finds the fields that it does not serve."""

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = ()
    """JSON schemas that say how fields go together. They are for the OpenAPI document; validators
    are what refuses, in words of their own."""

    @model_validator(mode="wrap")
    @classmethod
    def _meet_foreign_fields(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Leave out the fields that the body does not serve, and refuse those without which the
        answer would be wrong."""
        if not isinstance(data, dict):
            return validate(data)
        own, foreign = cls._fields()
        ignored = []
        for name, value in data.items():
            if value is None or name in own:
                continue
            if kind := cls._complaint(name, value):
                raise cls._refusal(name, value, kind)
            if cls._is_ignored(name, value):
                ignored.append(name)
        keeps_others = cls.model_config.get("extra") == "allow"
        taken = {
            name: value
            for name, value in data.items()
            if name in own or (keeps_others and value is not None and name not in foreign)
        }
        try:
            made = validate(taken)
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == _UNKNOWN_WORD]
            if not unknown:
                raise
            made = validate(_without(taken, unknown))
            ignored += [".".join(map(str, place)) for place in unknown]
        made._ignored = tuple(ignored)
        return made

    @classmethod
    def _refusal(cls, name: str, value: Any, kind: str | PydanticCustomError) -> ValidationError:
        """Return the error of a field's value, which tells the field's whole path."""
        error: InitErrorDetails = {"type": kind, "loc": (name,), "input": value}
        return ValidationError.from_exception_data(cls.__name__, [error])

    @classmethod
    def _complaint(cls, name: str, value: Any) -> PydanticCustomError | None:
        """Return the error of a value of a field that is not served; None if it is taken."""
        own, foreign = cls._fields()
        if name in foreign:
            if not foreign[name].refused or foreign[name].is_no_op(value):
                return None
            why = {"why": foreign[name].why}
            return PydanticCustomError("unsupported_parameter", "not supported: {why}", why)
        if not cls.refuses_unknown:
            return None
        meant = {"meant": did_you_mean(str(name), own)}
        return PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", meant)

    @classmethod
    def _is_ignored(cls, name: str, value: Any) -> bool:
        """Return whether the answer names a field that is left out: one that would have meant
        something."""
        _, foreign = cls._fields()
        if name in foreign:
            return not foreign[name].is_no_op(value)
        return cls.model_config.get("extra") == "forbid"

    @classmethod
    @cache
    def _fields(cls) -> tuple[list[str], dict[str, ForeignFields]]:
        """Return the names of the fields that are served, and the table's of those that are not."""
        own = [field.alias or name for name, field in cls.model_fields.items()]
        return own, {} if cls.place is None else foreign_fields(cls.place, own)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema with the fields that are taken, the values that are taken of others,
        and the rules."""
        schema = handler(core)
        resolved = handler.resolve_ref_schema(schema)
        if resolved.get("additionalProperties") is False:
            resolved["additionalProperties"] = {"type": "null"} if cls.refuses_unknown else True
        properties = resolved.setdefault("properties", {})
        for name, fields in sorted(cls._fields()[1].items()):
            properties[name] = (
                {"enum": [None, *(fields.no_ops or ())], "description": f"Refused: {fields.why}."}
                if fields.refused
                else {"description": f"Taken, and means nothing: {fields.why}."}
            )
        if cls.rules:
            resolved["allOf"] = list(cls.rules)
        return schema


def _without(fields: dict[str, Any], places: Iterable[tuple[int | str, ...]]) -> dict[str, Any]:
    """Return fields without those at ``places``, or without these entries of lists."""
    gone = set(places)
    return {
        name: [each for index, each in enumerate(value) if (name, index) not in gone]
        if isinstance(value, list)
        else value
        for name, value in fields.items()
        if (name,) not in gone
    }


def ignored_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields and entries of a body that were left out."""
    if isinstance(value, LeftOut):
        yield path
    elif isinstance(value, RequestBody):
        yield from (_within(path, name) for name in value._ignored)
        for name, field in type(value).model_fields.items():
            yield from ignored_paths(getattr(value, name), _within(path, field.alias or name))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from ignored_paths(entry, _within(path, str(index)))


def _within(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def exactly_one(*names: str) -> ConfigDict:
    """Configure a request body of whose fields ``names`` one must be given: its schema says so.

    The body's own validator is what refuses none and several, in the words of the route.
    """
    return ConfigDict(json_schema_extra={"oneOf": [is_given(name) for name in names]})


def is_given(*names: str) -> dict[str, JsonValue]:
    """Return a schema of objects that have all fields of these ``names``, none of them null."""
    return {
        "required": list(names),
        "properties": {name: {"not": {"type": "null"}} for name in names},
    }


def where(fields: dict[str, JsonValue], then: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a schema that holds objects to ``then`` whose ``fields`` are there and are valid under
    these schemas."""
    return {"if": {"required": list(fields), "properties": fields}, "then": then}


def is_true(name: str) -> dict[str, JsonValue]:
    """Return a schema of objects whose field ``name`` is true."""
    return {"required": [name], "properties": {name: {"const": True}}}


def has_entries(name: str, entry: JsonValue = True) -> dict[str, JsonValue]:
    """Return a schema of objects whose field ``name`` is a list with an entry of this schema."""
    entries: dict[str, JsonValue] = {"type": "array", "minItems": 1, "contains": entry}
    return {"required": [name], "properties": {name: entries}}


GIVEN: JsonValue = {"not": {"type": "null"}}
NONEMPTY_LIST: JsonValue = {"type": "array", "minItems": 1}


class ResponseBody(BaseModel):
    """Base of all response bodies, which have the fields that are documented and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def metadata_parameter(*, required: bool) -> dict[str, Any]:
    """Describe ``MetadataParam`` for a route's ``openapi_extra``; where it is ``required``, there
    must be a pair."""
    pairs = {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "maxProperties": MOST_PAIRS,
    }
    return {
        "parameters": [
            {
                "name": "metadata",
                "in": "query",
                "required": required,
                "style": "deepObject",
                "explode": True,
                "description": (
                    "Pairs that a context cache must have, all of them: metadata[project]=x."
                ),
                "schema": pairs | ({"minProperties": 1} if required else {}),
            }
        ]
    }


async def _metadata(request: Request) -> dict[str, str]:
    """Read ``metadata[key]=value`` of the query string, as OpenAI's API and clients write pairs.

    Raises InvalidRequestError for parameters that only look like pairs, and for one key with
    several values.
    """
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith("metadata"):
            continue
        match = re.fullmatch(r"metadata\[(.*)\]", name, re.DOTALL)
        if match is None:
            raise InvalidRequestError(
                f"{name!r} is no pair of metadata. Write metadata[project]=x.", param="metadata"
            )
        if pairs.setdefault(match[1], value) != value:
            raise InvalidRequestError(
                f"{name!r} is given with two values; no context cache has both.", param=name
            )
    if len(pairs) > MOST_PAIRS:
        raise InvalidRequestError(
            f"{len(pairs)} pairs of metadata; no context cache has more than {MOST_PAIRS}.",
            param="metadata",
        )
    return pairs


MetadataParam = Annotated[dict[str, str], Depends(_metadata)]
