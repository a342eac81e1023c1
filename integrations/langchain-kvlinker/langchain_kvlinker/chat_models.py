"""The chat model: LangChain's own for OpenAI's API, with what kvlinker's has beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import openai
from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field, SecretStr

from langchain_kvlinker.documents import sent_content
from langchain_kvlinker.server import default_key, default_url

PROVIDER = "kvlinker"
LINK_OPTIONS = ("policy", "implicit")


class ChatKVLinker(BaseChatOpenAI):
    """A model behind a kvlinker server.

    Message content may have blocks ``{"type": "context_cache", "id": …}``, and those that
    ``context_blocks`` makes of documents, of which the server gets the ids. ``policy``,
    ``implicit`` and ``documents`` can also be given for one call: ``model.invoke(…,
    documents=[…])``; an ``extra_body`` with ``link`` counts before the model's own, too. What the
    prompt reused is in the answer's ``usage_metadata`` and, with the context caches, in
    ``response_metadata``.
    """

    model_name: str = Field(default="default", alias="model")
    """The name that the server has for its model, or ``default``."""

    openai_api_base: str | None = Field(default_factory=default_url, alias="base_url")
    """The server's address, with ``/v1``; ``KVLINKER_BASE_URL``, or this machine's port 8000, by
    default."""

    openai_api_key: SecretStr | None = Field(default_factory=default_key, alias="api_key")  # type: ignore[assignment]
    """``KVLINKER_API_KEY`` by default; servers without keys take any."""

    stream_usage: bool | None = True
    """True if streams end with the usage."""

    policy: str | None = None
    """The linking policy, such as ``legolink-16``; the server's own by default."""

    implicit: Literal["structure", "auto", "marked", "off"] | None = None
    """The texts that become chunks without an id; the server's own setting by default."""

    @property
    def _llm_type(self) -> str:
        return "kvlinker-chat"

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The names of environment variables that hold secrets, by the arguments that they stand
        for."""
        return {"openai_api_key": "KVLINKER_API_KEY"}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": PROVIDER}

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        messages = [
            message.model_copy(update={"content": sent_content(message.content)})
            for message in self._convert_input(input_).to_messages()
        ]
        payload = super()._get_request_payload(messages, stop=stop, **kwargs)
        if "messages" not in payload:
            raise ValueError(
                "LangChain would drop chunks from what it sends to the Responses API. Leave out"
                " what asks for that, such as use_responses_api, reasoning, include and tools of"
                " OpenAI's own."
            )
        for message, sent in zip(messages, payload["messages"], strict=True):
            if isinstance(message, AIMessage) and (
                reasoning := message.additional_kwargs.get("reasoning_content")
            ):
                sent["reasoning_content"] = reasoning
        extra: dict[str, Any] = dict(payload.pop("extra_body", None) or {})
        own = {option: getattr(self, option) for option in LINK_OPTIONS}
        given = {option: payload.pop(option, None) for option in LINK_OPTIONS}
        if chosen := {**_set(own), **extra.get("link", {}), **_set(given)}:
            extra["link"] = chosen
        if documents := payload.pop("documents", None):
            extra["documents"] = [_document(document) for document in documents]
        return payload | ({"extra_body": extra} if extra else {})

    def _create_chat_result(
        self,
        response: dict[str, Any] | openai.BaseModel,
        generation_info: dict[str, Any] | None = None,
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        told = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for generation, choice in zip(result.generations, told["choices"], strict=True):
            generation.message.response_metadata["model_provider"] = PROVIDER
            if reasoning := choice["message"].get("reasoning_content"):
                generation.message.additional_kwargs["reasoning_content"] = reasoning
        result.llm_output = {
            **(result.llm_output or {}),
            "model_provider": PROVIDER,
            **_link_of(told),
        }
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type,
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(
            chunk, default_chunk_class, base_generation_info
        )
        if generation is None or not isinstance(generation.message, AIMessageChunk):
            return generation
        event = chunk.get("chunk") or chunk  # structured streams wrap the server's events
        if choices := event.get("choices"):
            generation.message.response_metadata["model_provider"] = PROVIDER
            if reasoning := choices[0]["delta"].get("reasoning_content"):
                generation.message.additional_kwargs["reasoning_content"] = reasoning
        generation.message.response_metadata.update(_link_of(event))
        return generation

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose answers are valid under ``schema``, which the server enforces token
        by token.

        ``method``: by ``json_schema``, by a call of a function (``function_calling``), or, by
        ``json_mode``, any JSON object. ``kwargs`` are those of LangChain's own method.
        """
        return super().with_structured_output(schema, method=method, **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the text's token ids, as the server's tokenizer has them."""
        ids: list[int] = self._tokenize({"text": text})["tokens"]
        return ids

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
        **kwargs: Any,
    ) -> int:
        """Return the number of tokens of the prompt that messages and tools make, chat template and
        context caches included."""
        body: dict[str, Any] = {"messages": self._get_request_payload(list(messages))["messages"]}
        if tools:
            body["tools"] = [convert_to_openai_tool(tool) for tool in tools]
        count: int = self._tokenize(body)["count"]
        return count

    def _tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        url = str(self.root_client.base_url.join("../tokenize"))
        answer: dict[str, Any] = self.root_client.post(url, cast_to=object, body=dict(body))
        return answer


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None."""
    return {option: value for option, value in options.items() if value is not None}


def _document(document: Document | Mapping[str, Any]) -> dict[str, Any]:
    """Return a document as the server takes it; of LangChain's metadata only the title."""
    if not isinstance(document, Document):
        return dict(document)
    title = document.metadata.get("title")
    return {"text": document.page_content} | ({} if title is None else {"title": str(title)})


def _link_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the prompt was linked, where chunks took part."""
    return {"link": told["link"]} if told.get("link") else {}
