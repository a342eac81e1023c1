"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import Body, Text
from kvlinker.server.bodies.generation import GenerationBody
from kvlinker.server.bodies.parts import Part
from kvlinker.types.sampling import SamplingParams

_Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Part], Field(min_length=1), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class Message(Body):
    """One turn of a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"tool_call_id"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "function_call": (), "refusal": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content
    name: Text | None = None

    def plain(self) -> dict[str, Any]:
        """As ``LLM.chat_prompt`` takes it. Few chat templates know developers, who are the system's new name."""
        content = self.content if isinstance(self.content, str) else [part.model_dump() for part in self.content]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, "name": self.name}


class ChatBody(GenerationBody):
    """As OpenAI's, with context caches in the content."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationBody.refused | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]

    def sampling_params(self) -> SamplingParams:
        return self.sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
