"""Fields of all requests that generate: sampling, linking and streaming."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MAX_CHOICES, MOST_STOPS
from kvlinker.doors.http.fields.bodies import RequestBody, Text, Unicode, is_true, where

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024), Unicode]

_Stop = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]


class LinkOptions(RequestBody):
    """Options of linking cached chunks; ``policy`` such as ``legolink-16``. ``implicit`` says which
    texts become chunks without an id. With ``explain``, the answer tells how its prompt was linked,
    and with ``attention`` also the question's attention in each layer."""

    policy: Annotated[str, StringConstraints(min_length=1), Unicode] | None = None
    implicit: Literal["auto", "marked", "off"] | None = None
    explain: bool | None = None
    attention: bool | None = None


_Seed = Annotated[
    int, Field(ge=-(2**63), le=2**63 - 1), WithJsonSchema({"type": "integer", "format": "int64"})
]
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
    "properties": {
        "link": {"properties": {name: {"enum": [None, False]} for name in ("explain", "attention")}}
    }
}
"""The rule of routes whose answers tell no explanation."""


class SamplingBody(RequestBody):
    """Fields that chat completions and completions share: sampling, stopping, streaming and
    linking.

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
            raise InvalidRequestError(
                "'stream_options' needs 'stream' to be true.", param="stream_options"
            )
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
