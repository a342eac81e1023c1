"""Fields by which all generating requests control decoding: how tokens are drawn, which are
forbidden or favoured, and where the answer ends.

They are OpenAI's and vLLM's, and become ``SamplingParams``.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from kvlinker.base.types.limits import MOST_BIASED, MOST_ENDINGS, MOST_STOPS
from kvlinker.base.types.sampling import MOST_BIAS
from kvlinker.doors.http.fields.bodies import TokenId, Unicode
from kvlinker.doors.http.fields.structured import StructuredFields

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


class DecodingFields(StructuredFields):
    """Fields of sampling and stopping. Absent and null mean the default."""

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

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given, by name, but for grammars, limits
        and log probabilities."""
        given = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given
