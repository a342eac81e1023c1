"""Where the server is, and the client that calls those of its routes which OpenAI's API does not
have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import openai

DEFAULT_URL = "http://localhost:8000/v1"


def default_url() -> str:
    """Return the server's address by ``KVLINKER_BASE_URL``, or this machine's port 8000."""
    return os.environ.get("KVLINKER_BASE_URL", DEFAULT_URL)


def default_key() -> str:
    """Return the API key by ``KVLINKER_API_KEY``; servers without keys take any."""
    return os.environ.get("KVLINKER_API_KEY", "none")


def post(base_url: str, api_key: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a route, whose path may begin with ``../``. Raises the errors of
    OpenAI's client."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        answer: Any = client.post(str(client.base_url.join(path)), cast_to=object, body=dict(body))
    told: dict[str, Any] = answer
    return told
