"""The options of vLLM's connector that are not among kvlinker's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlinker.base.errors import InvalidRequestError
from kvlinker.settings import Settings, read_settings
from kvlinker_vllm.scheduler.transfer_throttle import SLOWDOWN

REFUSAL_FILE = "refusal_file"
"""The option that names a file for the one line in which a worker says why it refuses the model:
vLLM itself reports to its front end only that it did not start."""


class ConnectorOptions(BaseModel):
    """The connector's own options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slice_tokens: int = Field(256, ge=1)
    """The most tokens that a step links while other requests are being computed."""

    slowdown: float = Field(SLOWDOWN, gt=1)
    """The factor by which linking one request may lengthen the time between others' tokens, on
    average."""

    allow_untested: bool = False
    """True to run in versions of vLLM that kvlinker was not tested with."""

    @classmethod
    def pop_from(cls, options: dict[str, Any]) -> Self:
        """Remove the connector's options from ``options`` and return them. Raises
        InvalidRequestError."""
        options.pop(REFUSAL_FILE, None)
        own = {name: options.pop(name) for name in cls.model_fields if name in options}
        try:
            return cls.model_validate(own)
        except ValidationError as error:
            (first, *_) = error.errors()
            name = ".".join(map(str, first["loc"]))
            raise InvalidRequestError(
                f"{name} is {first['input']!r}; {first['msg'].lower()}.", param="vllm_options"
            ) from error


def connector_settings(options: Mapping[str, Any]) -> Settings:
    """Read kvlinker's settings, with these of ``kv_connector_extra_config``. Raises
    InvalidRequestError."""
    return read_settings(options, source=lambda name: f"kv_connector_extra_config: {name}")
