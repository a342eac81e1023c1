"""Content parts: text and context caches, as chat messages, prompts and /tokenize take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from kvlinker.server.bodies.base import Text


class TextPart(BaseModel):
    """Fresh text. Fields of other providers, such as ``cache_control``, are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["text"]
    text: Text


class ContextCachePart(BaseModel):
    """The chunk of a context cache."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Literal["context_cache"]
    id: Text


class UnknownPart(BaseModel):
    """Stands for every other part, to say which types there are."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "context_cache"]


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("text", "context_cache") else "<unknown>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ContextCachePart, Tag("<context_cache>")]
    | Annotated[UnknownPart, Tag("<unknown>")],
    Discriminator(_part_kind),
]
