"""The language model: LlamaIndex's own for servers like OpenAI's, which sends chunks as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.llms.kvlinker.content import body_messages, has_chunks, without_chunks
from llama_index.llms.kvlinker.server import default_key, default_url, post
from llama_index.llms.openai_like import OpenAILike


class KVLinker(OpenAILike):
    """A model behind a kvlinker server, by default the one at ``KVLINKER_BASE_URL``.

    Messages may have chunks: elements of ``ContextCachePostprocessor``, blocks of
    ``context_cache``, ``CitableBlock``, and text in front of a ``CachePoint``, which here means
    that text, not all that stands before it.
    """

    model: str = Field(
        default="default", description="The name that the server has for its model, or default."
    )
    api_base: str = Field(
        default_factory=default_url, description="The server's address, with /v1."
    )
    api_key: str = Field(
        default_factory=default_key, description="The API key; servers without keys take any."
    )
    is_chat_model: bool = Field(default=True, description="True: the server has the chat routes.")
    is_function_calling_model: bool = Field(
        default=True, description="True: the server takes tools."
    )
    should_use_structured_outputs: bool = Field(
        default=True, description="True: the server enforces JSON schemas."
    )
    policy: str | None = Field(default=None, description="The linking policy, such as legolink-16.")
    implicit: str | None = Field(
        default=None, description="The texts that become chunks without an id."
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{"model": "default", "api_base": default_url(), "api_key": default_key(), **options}
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the name by which the class is stored."""
        return "KVLinker"

    @property
    def metadata(self) -> LLMMetadata:
        """What the model can do; its context window is the server's, unless one was given."""
        if "context_window" not in self.model_fields_set:
            told = post(self.api_base, self.api_key, "../tokenize", {"text": ""})
            self.context_window = told["max_model_len"]
        return super().metadata

    # What completions of one prompt call, too:

    def _chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return super()._chat(without_chunks(messages), **_with_chunks(messages, kwargs))

    def _stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return super()._stream_chat(without_chunks(messages), **_with_chunks(messages, kwargs))

    async def _achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await super()._achat(without_chunks(messages), **_with_chunks(messages, kwargs))

    async def _astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return await super()._astream_chat(
            without_chunks(messages), **_with_chunks(messages, kwargs)
        )

    def _get_model_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        fields: dict[str, Any] = super()._get_model_kwargs(**kwargs)
        extra = {**self.additional_kwargs.get("extra_body", {}), **kwargs.get("extra_body", {})}
        link = {"policy": self.policy, "implicit": self.implicit}
        if chosen := {option: value for option, value in link.items() if value is not None}:
            extra["link"] = {**chosen, **extra.get("link", {})}
        return fields | ({"extra_body": extra} if extra else {})


def _with_chunks(messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with the messages as the server takes them, where they have
    chunks.

    OpenAI's client lays ``extra_body`` over the body, and so over the messages that LlamaIndex's
    own class writes.
    """
    if not has_chunks(messages):
        return kwargs
    return {
        **kwargs,
        "extra_body": {**kwargs.get("extra_body", {}), "messages": body_messages(messages)},
    }
