"""Defines the settings of the audit, and of the policies that follow its findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from kvlinker.settings.values import CommaSeparated, Share

_NEEDED = {
    "audit_tokens": "audit",
    "audit_log": "audit",
    "audit_log_text": "audit_log",
    "quality_target": "audit",
    "quality_policies": "quality_target",
    "quality_per_tenant": "quality_target",
}
"""The setting without which another one has no effect."""


class AuditSettings(BaseSettings):
    """The answers that are compared with the full computation, and the effects of that."""

    audit: Share = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "Share of answers, such as 1%, that are compared with the full computation in idle"
            " time."
        ),
    )
    audit_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens that the audit computes in an hour; no limit by default.",
    )
    audit_log: Path | None = Field(
        default=None,
        description="File that gets a line of JSON for each compared answer: hashes and figures.",
    )
    audit_log_text: bool = Field(
        default=False, description="Write the texts of prompts and answers there, too."
    )

    quality_target: Share | None = Field(
        default=None,
        gt=0.5,
        lt=1,
        description=(
            "Share of answers, such as 0.98, that are to agree with the full computation: the"
            " default policy's number follows what the audit finds."
        ),
    )
    quality_policies: CommaSeparated = Field(
        default=(),
        description=(
            "Policies that it may become, the cheapest first, with commas between; by default other"
            " numbers of policy. The last resort is full."
        ),
    )
    require_certificate: bool = Field(
        default=False,
        description=(
            "Answer only under policies that kvlinker-lab certify has certified with this model,"
            " and full."
        ),
    )
    quality_per_tenant: bool = Field(
        default=False, description="Steer the default policy of each tenant apart."
    )

    @field_validator(*_NEEDED)
    @classmethod
    def _has_what_it_needs(cls, value: Any, info: ValidationInfo) -> Any:
        needed = _NEEDED[str(info.field_name)]
        if value and needed in info.data and not info.data[needed]:
            raise ValueError(f"it has no effect without {needed}: set that, too, or leave this out")
        return value
