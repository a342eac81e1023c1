"""Defines the settings of the engine: how much it computes at once, and on what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings


class EngineSettings(BaseSettings):
    """The numbers of tokens and requests that are computed at once, their times, and the
    hardware."""

    max_model_len: int | None = Field(
        default=None, ge=8, description="Tokens; the model's own limit by default."
    )
    kv_slots: int | None = Field(default=None, ge=16, description="Tokens that the KV pool holds.")
    prefix_cache: Literal["on", "off"] = Field(
        default="on", description="Reuse what requests computed in later ones that begin alike."
    )
    max_step_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Most tokens computed in one step; by default 512 on CPUs, 2048 on GPUs and in vLLM."
        ),
    )
    max_running: int = Field(default=64, ge=1, description="Most requests computed in one step.")
    max_waiting: int = Field(default=256, ge=1, description="Longer queues answer 429.")
    slo_tpot: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Most milliseconds per token of running answers: prompts are computed meanwhile in"
            " pieces that fit; by default 2.25 times what decoding alone takes, and longer if"
            " several answers with short prompts wait."
        ),
    )
    slo_ttft: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Requests that would wait longer for their first token, in seconds, answer 429."
        ),
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="CPU threads for the model; all that there are by default.",
    )

    native: Literal["auto", "build", "off"] = Field(
        default="auto",
        description=(
            "Native code for attention, norms and products with weights in bfloat16, in vLLM for"
            " placing chunks, on CPUs with AVX-512, AVX2 or NEON: that of kvlinker's wheel, or"
            " compiled where there is none (auto); always compiled here (build); none (off)."
        ),
    )
