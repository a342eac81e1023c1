"""The body of /tokenize."""

from __future__ import annotations

from pydantic import Field, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import Body, Text
from kvlinker.server.bodies.chat import Message
from kvlinker.server.bodies.completion import Prompt


class TokenizeBody(Body):
    """One of: ``text``, encoded as it is; ``prompt``, as a completion has it; ``messages``, as a chat has them."""

    model: Text | None = None
    text: Text | None = None
    prompt: Prompt | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        given = [name for name in ("text", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "Give exactly one of 'text', 'prompt' and 'messages'.", param=given[1] if given else "text"
            )
        return self
