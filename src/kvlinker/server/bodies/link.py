"""The body of /v1/link/explain."""

from __future__ import annotations

from pydantic import Field, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import Body, Text
from kvlinker.server.bodies.chat import Message
from kvlinker.server.bodies.completion import PlainPrompt, Prompt, single_prompt
from kvlinker.server.bodies.generation import LinkOptions


class ExplainBody(Body):
    """One of ``messages``, as a chat has them, and ``prompt``, as a completion has it; and how to link."""

    model: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    prompt: Prompt | None = None
    link: LinkOptions | None = None

    @model_validator(mode="after")
    def _check_source(self) -> ExplainBody:
        if (self.messages is None) == (self.prompt is None):
            raise InvalidRequestError("Give exactly one of 'messages' and 'prompt'.", param="messages")
        return self

    def plain_prompt(self) -> PlainPrompt:
        return single_prompt(self.prompt or "")
