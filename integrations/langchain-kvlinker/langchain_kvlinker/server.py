"""Where the server is, and the client that calls those of its routes which OpenAI's API does not
have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
from langchain_core.utils import from_env, secret_from_env
from pydantic import BaseModel, Field, SecretStr

DEFAULT_URL = "http://localhost:8000/v1"

default_url = from_env("KVLINKER_BASE_URL", default=DEFAULT_URL)
default_key = secret_from_env("KVLINKER_API_KEY", default="none")


class Server(BaseModel):
    """A kvlinker server: its address and the API key, by default those of ``KVLINKER_BASE_URL`` and
    ``KVLINKER_API_KEY``."""

    base_url: str = Field(default_factory=default_url)
    api_key: SecretStr = Field(default_factory=default_key)

    def post(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what a route below ``/v1`` lists under ``data``. Raises the errors of OpenAI's
        client."""
        with openai.OpenAI(
            base_url=self.base_url, api_key=self.api_key.get_secret_value()
        ) as client:
            answer: Any = client.post(path, cast_to=object, body=dict(body))
        data: list[dict[str, Any]] = answer["data"]
        return data
