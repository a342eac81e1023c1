"""Fields of both completion routes that say how an answer is decoded: what is forbidden, likelier,
or its end.

They are OpenAI's and vLLM's, and become ``SamplingParams``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, StringConstraints, model_validator

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MOST_BIASED, MOST_ENDINGS
from kvlinker.base.types.sampling import MOST_BIAS
from kvlinker.doors.http.fields.bodies import TokenId, Unicode, is_true
from kvlinker.doors.http.fields.sampling import ATTENTION_IS_EXPLAINED, SamplingBody
from kvlinker.doors.http.fields.structured import (
    ResponseFormatBody,
    StructuredOutputsBody,
    answer_grammar,
)

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
    "prompt_logprobs",
)


class DecodingBody(SamplingBody):
    """Adds to ``SamplingBody`` what is not needed every day. Absent and null mean the default."""

    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        {
            "if": is_true("stream"),
            "then": {"properties": {"prompt_logprobs": {"type": "null"}}},
            "else": {"properties": {"stream_options": {"type": "null"}}},
        },
        ATTENTION_IS_EXPLAINED,
    )

    service_tier: Literal["auto", "default", "flex"] | None = None
    logit_bias: _LogitBias | None = Field(
        default=None, description="By token id, numbers that are added to logits."
    )
    min_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_ENDINGS)] | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MOST_ENDINGS)] | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="The alternatives to tell of each prompt token; not with `stream`.",
    )

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> DecodingBody:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "'prompt_logprobs' are not told in streams.", param="prompt_logprobs"
            )
        return self

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that are given, by name, but for ``max_tokens``
        and ``logprobs``."""
        given = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if grammar := answer_grammar(self.response_format, self.structured_outputs):
            given["grammar"] = grammar
        return given
