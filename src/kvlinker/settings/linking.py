"""Defines the settings of linking: which texts become chunks, and how chunks are linked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from kvlinker.base.errors import PolicyError
from kvlinker.base.types.chunks import GenerationContext
from kvlinker.linking import parse_policy

AUTO = "auto"
"""The policy that is chosen by what was measured with the model."""

UNMEASURED = "row+query-5-sensitive"
"""The policy that stands for ``AUTO`` until something was measured."""

Quality = Literal["high", "balanced", "fast"]


class LinkingSettings(BaseSettings):
    """Which policies link, and which texts become chunks without an id."""

    policy: str = Field(
        default=AUTO,
        description=(
            "Linking policy of requests that name none; auto: the cheapest that keeps quality, as"
            " a server measures it once with each model."
        ),
    )
    quality: Quality = Field(
        default="high",
        description=(
            "How far policy auto lets answers be from the full computation's: a mean KL of at most"
            " 0.05 (high), 0.1 (balanced) or 0.2 nats per token (fast)."
        ),
    )
    generation_context: GenerationContext = Field(
        default=GenerationContext.PREFIX,
        description="The default context of chunks: alone, bos, prefix.",
    )
    chunk_scores: bool = Field(
        default=True,
        description=(
            "Collect chunks' attention scores and sensitivity; cachecraft, h2o and"
            " query-…-sensitive use them."
        ),
    )
    state_inputs: bool = Field(
        default=True,
        description=(
            "Keep of chunks all that enters layers with a state (hybrid models), for policies that"
            " compute any token again; without, naive, prefix and short legolink work, in less"
            " memory."
        ),
    )
    max_variants: int = Field(
        default=64,
        ge=0,
        description="Variants of chunks that are kept for cachecraft and prefix policies; 0: none.",
    )

    implicit: Literal["structure", "auto", "marked", "off"] = Field(
        default="marked",
        description=(
            "Texts that become chunks without an id: marked (documents, and parts with"
            " cache_control), auto (also long ones that are repeated, and known ones inside"
            " others), structure (definitions of tools, messages and paragraphs), off."
        ),
    )
    implicit_ahead: Literal["on", "off"] = Field(
        default="on",
        description=(
            "With implicit auto or structure: compute new passages while nothing else is to be"
            " done."
        ),
    )
    implicit_policy: str | None = Field(
        default=None,
        description="Linking policy of prompts none of whose chunks has an id; policy by default.",
    )
    implicit_ttl: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds that chunks without an id live from their last use.",
    )
    keep_answers: Literal["off", "answer"] = Field(
        default="off",
        description="Answers that become chunks with the KV that they were generated with.",
    )
    tool_wait: float = Field(
        default=60.0,
        ge=0,
        le=3600,
        description="Most seconds that a conversation is kept before others while its tool is out.",
    )
    implicit_caches: int = Field(
        default=1000,
        ge=0,
        description="Most chunks without an id that a tenant keeps; those used last stay.",
    )

    @property
    def usual_policy(self) -> str:
        """The policy that is set, or that stands for ``AUTO`` until something was measured."""
        return UNMEASURED if self.policy == AUTO else self.policy

    @field_validator("policy", "implicit_policy")
    @classmethod
    def _known_policy(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == AUTO and info.field_name == "policy":
            return value
        try:
            return None if value is None else parse_policy(value).name
        except PolicyError as error:
            raise PolicyError(error.message, param=info.field_name) from error
