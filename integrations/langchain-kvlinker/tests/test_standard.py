"""LangChain's standard tests, against a server with the model in the box, or the one that
``KVLINKER_MODEL`` names."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_kvlinker import ChatKVLinker, KVLinkerRetriever

understanding = pytest.mark.xfail(
    "KVLINKER_MODEL" not in os.environ,
    reason=(
        "The model in the box is a toy: its calls are valid, but it knows no tools but those it was"
        " trained with."
    ),
)


class TestChatKVLinkerUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVLinker

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        address = "http://elsewhere/v1"
        variables = {"KVLINKER_BASE_URL": address, "KVLINKER_API_KEY": "key"}
        return (
            variables,
            {},
            {"openai_api_base": address, "openai_api_key": "key", "model_name": "default"},
        )


class TestChatKVLinkerIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _server(self, base_url: str) -> None:
        # the penalty that the makers of Qwen2.5 recommend: greedy answers of 0.5B may never end
        extra = {"repetition_penalty": 1.1}
        self._params = {
            "base_url": base_url,
            "temperature": 0,
            "max_tokens": 256,
            "extra_body": extra,
        }

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVLinker

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self._params

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        served = httpx.get(f"{self._params['base_url']}/models").raise_for_status()
        name: str = served.json()["data"][0]["id"]
        return name

    @understanding
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @understanding
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @understanding
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @understanding
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:
        super().test_unicode_tool_call_integration(model)


class TestKVLinkerRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _documents(self, facts: tuple[str, ...]) -> None:
        """Have some documents to be found."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return KVLinkerRetriever

    @property
    def retriever_query_example(self) -> str:
        return "Who lives where?"
