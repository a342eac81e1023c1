"""The bodies of /v1/context_caches: creation and change."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from kvlinker.context_caches import MAX_CHUNKS
from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import Body, Metadata, Name, Text
from kvlinker.types.chunks import GenerationContext

MAX_TTL = 100 * 365 * 24 * 3600.0
END_OF_TIME = 253_402_300_799.0
"""The last second of the year 9999."""

_Chunk = Annotated[Text, StringConstraints(min_length=1)]


def _seconds(value: Any) -> Any:
    """A ttl may be a number, or text such as "600s"."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?s", value):
        raise PydanticCustomError("ttl_format", 'Input should be a number of seconds, or text such as "600s"')
    return float(value[:-1])


class Lifetime(Body):
    """``ttl`` in seconds from now, or ``expires_at`` in Unix seconds."""

    ttl: Annotated[float | None, BeforeValidator(_seconds)] = Field(default=None, gt=0, le=MAX_TTL)
    expires_at: float | None = Field(default=None, le=END_OF_TIME)

    @model_validator(mode="after")
    def _check_lifetime(self) -> Lifetime:
        if self.ttl is not None and self.expires_at is not None:
            raise InvalidRequestError("Give 'ttl' or 'expires_at', not both.", param="expires_at")
        if self.expires_at is not None and self.expires_at <= time.time():
            raise InvalidRequestError(
                f"'expires_at' is in the past: {self.expires_at:.0f}. It takes Unix seconds.", param="expires_at"
            )
        return self

    def expiry(self) -> float | None:
        """In Unix seconds; None for never."""
        return self.expires_at if self.ttl is None else time.time() + self.ttl


class Split(Body):
    """How a text is cut into chunks (EPIC's KVSplit)."""

    method: Literal["fixed", "sentence", "paragraph", "passage", "markdown"] = "passage"
    max_tokens: int = Field(default=512, ge=1, le=2**31 - 1)


class CreateBody(Lifetime):
    """``chunks`` as they are, or ``input`` to be split."""

    model: Text | None = None
    chunks: list[_Chunk] | None = Field(default=None, min_length=1, max_length=MAX_CHUNKS)
    input: _Chunk | None = None
    split: Split | None = None
    name: Name | None = None
    metadata: Metadata | None = None
    context: Literal["alone", "bos", "prefix"] | None = None
    pinned: bool = False
    scope: Literal["private", "shared"] = "private"

    @model_validator(mode="after")
    def _check_source(self) -> CreateBody:
        if (self.chunks is None) == (self.input is None):
            raise InvalidRequestError("Give either 'chunks' or 'input'.", param="chunks")
        if self.split is not None and self.input is None:
            raise InvalidRequestError("'split' applies to 'input'; 'chunks' are cached as they are.", param="split")
        return self

    @property
    def generation_context(self) -> GenerationContext | None:
        return None if self.context is None else GenerationContext(self.context)


class UpdateBody(Lifetime):
    """What is absent stays; null removes."""

    name: Name | None = None
    metadata: Metadata | None = None
    pinned: bool = False

    def changes(self) -> dict[str, Any]:
        """Arguments for ``ContextCaches.update``."""
        given = self.model_fields_set
        changed: dict[str, Any] = {}
        if given & {"ttl", "expires_at"}:
            changed["expires_at"] = self.expiry()
        if "name" in given:
            changed["name"] = self.name
        if "metadata" in given:
            changed["metadata"] = self.metadata or {}
        if "pinned" in given:
            changed["pinned"] = self.pinned
        return changed
