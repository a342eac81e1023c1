"""Defines the settings of the server: where it listens, whom it answers, and what it logs."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from kvlinker.base.types.tenants import SHARED_TENANT
from kvlinker.settings.values import CommaSeparated, FromJson


class TenantQuota(BaseModel):
    """The limits of one tenant; None for the limit that all tenants have by default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: ByteSize | None = None
    caches: int | None = Field(default=None, ge=0)
    pinned_bytes: ByteSize | None = None


class ServerSettings(BaseSettings):
    """Where the server listens, whose requests it accepts, how it stops and what it logs."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to bind; without API keys only loopback is allowed.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")
    allowed_hosts: CommaSeparated = Field(
        default=(),
        description=(
            "Host names that requests may use besides localhost, comma-separated; * for any."
            " Without them, only servers without API keys check."
        ),
    )
    cors_origins: CommaSeparated = Field(
        default=(),
        description=(
            "Origins whose pages may call the server from browsers, such as https://app.example,"
            " with commas between; * for any. None by default."
        ),
    )
    request_timeout: float = Field(
        default=30,
        gt=0,
        description="Seconds in which a request's headers must arrive, and its body begin.",
    )
    drain_timeout: float = Field(
        default=25,
        ge=0,
        description="Seconds in which requests may finish when the server is asked to stop.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description=(
            "The level of the log: info has a line per request, warning and error only problems."
        ),
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How the log is written: text, or json, an object per line."
    )
    api_keys: CommaSeparated = Field(
        default=(),
        repr=False,
        description="Accepted keys, comma-separated; each is a separate tenant.",
    )
    admin_keys: CommaSeparated = Field(
        default=(),
        repr=False,
        description="Accepted keys that may also write shared context caches.",
    )
    response_ttl: float = Field(
        default=604_800.0,
        ge=0,
        description=(
            "Seconds that answers of the Responses API are kept from their last use; 0: not at all."
        ),
    )
    tenant_quotas: FromJson[dict[str, TenantQuota]] = Field(
        default={},
        repr=False,
        description='Other quotas, by API key or "shared": {"KEY": {"bytes": …, "caches": …}}.',
    )

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """All API keys, those of admins included."""
        return tuple(dict.fromkeys((*self.api_keys, *self.admin_keys)))

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+", origin):
                raise ValueError(
                    f"{origin!r} is no origin: write scheme, host and port, such as"
                    " https://app.example"
                )
        return value

    @field_validator("tenant_quotas")
    @classmethod
    def _known_tenants(
        cls, value: dict[str, TenantQuota], info: ValidationInfo
    ) -> dict[str, TenantQuota]:
        known = {SHARED_TENANT, *info.data.get("api_keys", ()), *info.data.get("admin_keys", ())}
        if strangers := len(value.keys() - known):
            raise ValueError(f"{strangers} of its names are neither API keys nor {SHARED_TENANT!r}")
        return value
