"""Defines the settings of a server in a fleet: its work for other servers, and theirs for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from kvlinker.settings.values import CommaSeparated, names_host


class FleetSettings(BaseSettings):
    """The work of a server for others, and the servers that compute for it."""

    role: Literal["both", "build", "serve"] = Field(
        default="both",
        description=(
            "build: compute chunks for other servers, and get no answers to give from a router;"
            " serve: compute none for others."
        ),
    )
    builders: CommaSeparated = Field(
        default=(),
        description=(
            "Addresses of builders, or of a router before them, that are asked for missing chunks,"
            " with commas between: http://10.0.0.7:8000."
        ),
    )
    build_tokens: int = Field(
        default=256, ge=1, description="The fewest tokens of a chunk that builders are asked for."
    )

    @field_validator("builders")
    @classmethod
    def _are_asked(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("engine") == "vllm":
            raise ValueError("the vllm engine asks no builders for chunks: leave it out")
        for url in value:
            if not names_host(url, "http", "https"):
                raise ValueError(f"{url!r} is no address: write http://HOST:PORT")
        return tuple(url.rstrip("/") for url in value)
