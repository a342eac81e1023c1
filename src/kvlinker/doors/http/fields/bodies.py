"""The parts of bodies: strict texts, bounded names and metadata, and the base of requests, which
leave out or refuse unknown fields.

Requests are validated by these models and become plain values (``kvlinker.base.types.messages``,
``SamplingParams``); responses are made of them, so that the OpenAPI document describes the bodies
that are sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

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
from kvlinker.base.types.chunks import LONGEST_KEY, LONGEST_NAME, LONGEST_VALUE, MOST_PAIRS
from kvlinker.base.types.messages import MARKS
from kvlinker.doors.http.fields.foreign import ForeignFields, Place, foreign_fields
from kvlinker.prompting.marks import ttl_seconds


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
    """Return the schema of ``LeftOut`` beside bodies of these ``types``: of a ``oneOf``, one schema
    alone may match."""
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

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Leave out the fields that the body does not serve, and refuse those without which the
        answer would be wrong."""
        if not isinstance(data, dict):
            return validate(data)
        ignored: list[str] = []
        if not cls._fields()[0].issuperset(data):  # most requests have no foreign field
            data, ignored = cls._served(data)
        try:
            made = validate(data)
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == _UNKNOWN_WORD]
            if not unknown:
                raise
            made = validate(_without(data, unknown))
            ignored += [".".join(map(str, place)) for place in unknown]
        if ignored:
            made._ignored = tuple(ignored)
        made.check()
        return made

    def check(self) -> None:
        """Refuse fields that do not go together. Raises InvalidRequestError. Bodies with such
        fields override it: the framework validates a body twice, and this runs once."""

    @classmethod
    def _served(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields that the body serves, and the names of others that the answer names."""
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
        served = {
            name: value
            for name, value in data.items()
            if name in own or (keeps_others and value is not None and name not in foreign)
        }
        return served, ignored

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
    def _fields(cls) -> tuple[frozenset[str], dict[str, ForeignFields]]:
        """Return the names of the fields that are served, and the table's of those that are not."""
        own = frozenset(field.alias or name for name, field in cls.model_fields.items())
        return own, {} if cls.place is None else foreign_fields(cls.place, own)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema with the fields that are taken, and the values that are taken of
        others."""
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


def ignored_paths(value: RequestBody | LeftOut | list[Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all fields and entries of a body that were left out: a body's own ones
    first, then those within its fields, in their order."""
    if isinstance(value, LeftOut):
        yield path
        return
    start = f"{path}." if path else ""
    entries: Iterable[tuple[object, Any]] = ()
    if isinstance(value, list):
        entries = enumerate(value)
    else:
        yield from [start + name for name in value._ignored]
        fields, values = type(value).model_fields, value.__dict__
        entries = [(field.alias or name, values[name]) for name, field in fields.items()]
    for name, entry in entries:
        if isinstance(entry, list | RequestBody | LeftOut):  # most are neither
            yield from ignored_paths(entry, f"{start}{name}")


def _check_ttl(text: str) -> str:
    try:
        ttl_seconds(text)
    except ValueError as error:
        raise PydanticCustomError(
            "ttl_format", "Input is wrong: {reason}", {"reason": str(error)}
        ) from error
    return text


MarkTtl = Annotated[Text, AfterValidator(_check_ttl)]


class CacheControl(RequestBody):
    """Marks a text part as a chunk, in Anthropic's form; ``ttl`` is how long it lives from its last
    use: "5m", "1h"."""

    type: Literal["ephemeral"]
    ttl: MarkTtl | None = None


class PromptCacheBreakpoint(RequestBody):
    """Marks a text part as a chunk, in OpenAI's form."""

    mode: Literal["explicit"]


class MarkableBody(RequestBody):
    """Base of parts that may be marked as chunks."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    def marks(self) -> dict[str, Any]:
        """Return the marks that are given, by field."""
        return self.model_dump(include=set(MARKS), exclude_none=True)


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
