"""Parts that the bodies of several routes share: strict types, content parts, sampling fields, pairs of metadata.

Requests are validated by these models and become plain values (``kvlinker.base.types.messages``, ``SamplingParams``);
responses are made of them, so that the OpenAPI document describes what is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Depends, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    StringConstraints,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.base.types.context_cache import LONGEST_KEY, LONGEST_NAME, LONGEST_VALUE, MOST_PAIRS
from kvlinker.base.types.limits import MAX_CHOICES, MOST_PARTS, MOST_STOPS
from kvlinker.base.types.messages import (
    MARKS,
    CachedPart,
    Content,
    ContextCacheReference,
    Document,
    MarkedText,
    TextSource,
)
from kvlinker.prompting.marks import ttl_seconds


def _require_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON's escapes can spell, but which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("text_unicode", "Input should be valid Unicode, without lone surrogates") from error
    return text


def _require_unicode_within(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Refuse the same anywhere in an object, which could not be sent back."""
    _require_unicode(json.dumps(value, ensure_ascii=False))
    return value


Unicode = AfterValidator(_require_unicode)
"""Stands last in the annotation of a text, so that the constraints before it speak of characters."""

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


class RequestBody(BaseModel):
    """Base of all request bodies: types are strict, unknown fields are refused unless they are null, which means
    nothing.

    The tags of unions stand in angle brackets, so that the path of an error can be told from them
    (see ``kvlinker.doors.http.edge.errors``).
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """OpenAI's fields that do not change the answer here."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """OpenAI's fields that would change the answer, with the values at which they have no effect."""

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = ()
    """JSON schemas that say how fields go together. They are for the OpenAPI document; validators are what refuses, in
    words of their own."""

    @model_validator(mode="before")
    @classmethod
    def _meet_foreign_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.refused.items():
            if not (data.get(name) is None or any(_is_same(data[name], value) for value in harmless)):
                kind = PydanticCustomError("unsupported_parameter", "not supported; leave it out")
                error = InitErrorDetails(type=kind, loc=(name,), input=data[name])
                raise ValidationError.from_exception_data(cls.__name__, [error])  # with the field's whole path
        cls._refuse_unknown(data)
        foreign = cls.ignored | cls.refused.keys()
        given = ((name, value) for name, value in data.items() if name not in foreign)
        return {name: value for name, value in given if value is not None or name in cls.model_fields}

    @classmethod
    def _refuse_unknown(cls, data: dict[str, Any]) -> None:
        """Refuse a field that there is not, and offer the nearest one that there is."""
        if cls.model_config.get("extra") != "forbid":
            return
        own = [field.alias or name for name, field in cls.model_fields.items()]
        known = {*own, *cls.ignored, *cls.refused}
        for name, value in data.items():
            if name not in known and value is not None:
                meant = {"meant": did_you_mean(str(name), own)}
                kind = PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", meant)
                error = InitErrorDetails(type=kind, loc=(name,), input=value)
                raise ValidationError.from_exception_data(cls.__name__, [error])

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema with the fields that are ignored, the values that are accepted of refused ones, and the
        rules."""
        schema = handler(core)
        resolved = handler.resolve_ref_schema(schema)
        if resolved.get("additionalProperties") is False:
            resolved["additionalProperties"] = {"type": "null"}
        properties = resolved.setdefault("properties", {})
        for name in sorted(cls.ignored):
            properties[name] = {"description": "Ignored: it does not change the answer here."}
        for name, harmless in sorted(cls.refused.items()):
            properties[name] = {"enum": [None, *harmless], "description": "Not supported."}
        if cls.rules:
            resolved["allOf"] = list(cls.rules)
        return schema


def _is_same(given: Any, value: Any) -> bool:
    """Return whether both are the same in JSON, where ``false`` is not 0, but 1.0 is 1."""
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def exactly_one(*names: str) -> ConfigDict:
    """Configure a request body of whose fields ``names`` one must be given: its schema says so.

    The body's own validator is what refuses none and several, in the words of the route.
    """
    return ConfigDict(json_schema_extra={"oneOf": [is_given(name) for name in names]})


def is_given(*names: str) -> dict[str, JsonValue]:
    """Return a schema of objects that have all fields of these ``names``, none of them null."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def where(fields: dict[str, JsonValue], then: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a schema that holds objects to ``then`` whose ``fields`` are there and are valid under these schemas."""
    return {"if": {"required": list(fields), "properties": fields}, "then": then}


def is_true(name: str) -> dict[str, JsonValue]:
    """Return a schema of objects whose field ``name`` is true."""
    return {"required": [name], "properties": {name: {"const": True}}}


def has_entries(name: str) -> dict[str, JsonValue]:
    """Return a schema of objects whose field ``name`` is a list that is not empty."""
    return {"required": [name], "properties": {name: NONEMPTY_LIST}}


GIVEN: JsonValue = {"not": {"type": "null"}}
NONEMPTY_LIST: JsonValue = {"type": "array", "minItems": 1}


class ResponseBody(BaseModel):
    """Base of all response bodies, which have the fields that are documented and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_ttl(text: str) -> str:
    try:
        ttl_seconds(text)
    except ValueError as error:
        raise PydanticCustomError("ttl_format", "Input is wrong: {reason}", {"reason": str(error)}) from error
    return text


_UP_TO_A_DAY = (
    r"^(([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2}|86400)s"
    r"|([1-9][0-9]{0,2}|1[0-3][0-9]{2}|14[0-3][0-9]|1440)m"
    r"|([1-9]|1[0-9]|2[0-4])h)$"
)
"""Matches what ``ttl_seconds`` takes."""

_MarkTtl = Annotated[Text, AfterValidator(_check_ttl), WithJsonSchema({"type": "string", "pattern": _UP_TO_A_DAY})]


class CacheControl(RequestBody):
    """Marks a text part as a chunk, in Anthropic's form; ``ttl`` is how long it lives from its last use: "5m", "1h"."""

    type: Literal["ephemeral"]
    ttl: _MarkTtl | None = None


class PromptCacheBreakpoint(RequestBody):
    """Marks a text part as a chunk, in OpenAI's form."""

    mode: Literal["explicit"]


class MarkableBody(RequestBody):
    """Base of what may be marked as a chunk."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    def marks(self) -> dict[str, Any]:
        """Return the marks that are given, by field."""
        return self.model_dump(include=set(MARKS), exclude_none=True)


class TextPart(MarkableBody):
    """Text, under any of the names that OpenAI's routes have for it: fresh, or a chunk that is found by what it says
    where one of the marks is given."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "index", "logprobs"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": ([],), "citations": ([],)}

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

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "index"})

    type: Literal["context_cache"]
    id: Text


class UnknownPart(BaseModel):
    """Catches parts of other types, which are all invalid: its error lists the types that exist."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "context_cache"]


_PART_TAGS = {"text": "<text>", "input_text": "<text>", "output_text": "<text>", "context_cache": "<context_cache>"}


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PART_TAGS.get(kind, "<unknown>") if isinstance(kind, str) else "<unknown>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ContextCachePart, Tag("<context_cache>")]
    | Annotated[SkipJsonSchema[UnknownPart], Tag("<unknown>")],
    Discriminator(_part_kind),
]

_Several = TypeVar("_Several")

TextOr = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Several, Tag("<several>")],
    Discriminator(lambda value: "<several>" if isinstance(value, list) else "<text>"),
]
"""A text, or a list of something."""

TextOrParts = TextOr[Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS)]]
"""The content of a message: a text, or texts and context caches in any order."""


def content_of(parts: Sequence[Part]) -> Content[CachedPart]:
    """Return the parts of a message or a prompt as the library takes them."""
    return tuple(
        part.content() if isinstance(part, TextPart) else ContextCacheReference(part.id)
        for part in parts
        if not isinstance(part, UnknownPart)
    )


StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024), Unicode]

_Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]


class DocumentBody(RequestBody):
    """A document that the conversation is about, which becomes a chunk. Chat templates that take documents also get
    its other fields, such as ``title``."""

    model_config = ConfigDict(extra="allow")

    text: Text
    title: Text | None = None

    def document(self) -> Document[CachedPart]:
        """Return the document as the library takes it."""
        title = {} if self.title is None else {"title": self.title}
        return Document(MarkedText(self.text, source=TextSource.DOCUMENT), title | (self.model_extra or {}))


class LinkOptions(RequestBody):
    """Options of linking cached chunks; ``policy`` such as ``legolink-16``. ``implicit`` says which texts become chunks
    without an id. With ``explain``, the answer tells how its prompt was linked, and with ``attention`` also the
    question's attention in each layer."""

    policy: Annotated[str, StringConstraints(min_length=1), Unicode] | None = None
    implicit: Literal["auto", "marked", "off"] | None = None
    explain: bool | None = None
    attention: bool | None = None


_Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WithJsonSchema({"type": "integer", "format": "int64"})]
"""Its bounds are no doubles, which are what an OpenAPI document has."""


class StreamOptions(RequestBody):
    """``include_usage``: end the stream with a chunk that holds the usage."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


ATTENTION_IS_EXPLAINED = where(
    {"link": is_true("attention")},
    {"properties": {"link": is_true("explain")}},
)
"""The rule that ``link.attention`` needs ``link.explain``."""


NOTHING_EXPLAINED: dict[str, JsonValue] = {
    "properties": {"link": {"properties": {name: {"enum": [None, False]} for name in ("explain", "attention")}}}
}
"""The rule of routes whose answers tell no explanation."""


class SamplingBody(RequestBody):
    """Fields that chat completions and completions share: sampling, stopping, streaming and linking.

    Absent and null mean the default.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "store",
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
        }
    )
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1,),
        "truncate_prompt_tokens": (),
    }

    model: Text | None = None
    link: LinkOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="-1 and 0 are off.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: _Seed | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    stop: _Stop | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("'stream_options' needs 'stream' to be true.", param="stream_options")
        return self

    @model_validator(mode="after")
    def _check_explanation(self) -> SamplingBody:
        if self.shows_attention and not self.explains:
            raise InvalidRequestError(
                "'link.attention' is a part of an explanation: it needs 'link.explain' to be true.",
                param="link.attention",
            )
        return self

    @property
    def choices(self) -> int:
        """The number of choices that are asked for, of each prompt."""
        return self.n or 1

    @property
    def policy(self) -> str | None:
        """The policy that is asked for; None for the server's own."""
        return self.link.policy if self.link else None

    @property
    def implicit(self) -> str | None:
        """The texts that are to become chunks without an id; None for the server's own setting."""
        return self.link.implicit if self.link else None

    @property
    def explains(self) -> bool:
        """True where the answer is to tell how its prompt was linked."""
        return bool(self.link and self.link.explain)

    @property
    def shows_attention(self) -> bool:
        """True where that is to tell the question's attention, too."""
        return bool(self.link and self.link.attention)

    @property
    def include_usage(self) -> bool:
        """True where a stream is to end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def metadata_parameter(*, required: bool) -> dict[str, Any]:
    """Describe ``MetadataParam`` for a route's ``openapi_extra``; where it is ``required``, there must be a pair."""
    pairs = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MOST_PAIRS}
    return {
        "parameters": [
            {
                "name": "metadata",
                "in": "query",
                "required": required,
                "style": "deepObject",
                "explode": True,
                "description": "Pairs that a context cache must have, all of them: metadata[project]=x.",
                "schema": pairs | ({"minProperties": 1} if required else {}),
            }
        ]
    }


async def _metadata(request: Request) -> dict[str, str]:
    """Read ``metadata[key]=value`` of the query string, as OpenAI's API and clients write pairs.

    Raises InvalidRequestError for parameters that only look like pairs, and for one key with several values.
    """
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith("metadata"):
            continue
        match = re.fullmatch(r"metadata\[(.*)\]", name, re.DOTALL)
        if match is None:
            raise InvalidRequestError(f"{name!r} is no pair of metadata. Write metadata[project]=x.", param="metadata")
        if pairs.setdefault(match[1], value) != value:
            raise InvalidRequestError(f"{name!r} is given with two values; no context cache has both.", param=name)
    if len(pairs) > MOST_PAIRS:
        raise InvalidRequestError(
            f"{len(pairs)} pairs of metadata; no context cache has more than {MOST_PAIRS}.", param="metadata"
        )
    return pairs


MetadataParam = Annotated[dict[str, str], Depends(_metadata)]
