"""What chat completions and completions have in common: sampling, stopping, streaming and linking."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import Body, Text
from kvlinker.types.sampling import SamplingParams

MAX_CHOICES = 128

_StopText = Annotated[Text, StringConstraints(min_length=1, max_length=1024)]

_Stop = Annotated[
    Annotated[_StopText, Tag("<text>")] | Annotated[list[_StopText], Field(max_length=16), Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]


class LinkOptions(Body):
    """How cached chunks are linked; ``policy`` such as ``legolink-16``."""

    policy: Annotated[Text, StringConstraints(min_length=1)] | None = None


class StreamOptions(Body):
    """``include_usage``: end the stream with a chunk that holds the usage."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class GenerationBody(Body):
    """The fields of both routes; absent and null mean the default."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "store",
            "metadata",
            "service_tier",
            "parallel_tool_calls",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
        }
    )
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"logit_bias": ({},)}

    model: Text | None = None
    link: LinkOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="-1 and 0 are off.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    stop: _Stop | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("'stream_options' needs 'stream' to be true.", param="stream_options")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def policy(self) -> str | None:
        return self.link.policy if self.link else None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; what is not given has their defaults."""
        names = (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "ignore_eos",
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **given, top_k=max(0, self.top_k or 0), stop=stop, max_tokens=max_tokens, logprobs=logprobs
        )
