"""Finds the facts about an OpenAI-compatible server that are needed before traffic is sent to
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx
import numpy as np

from kvlinker.base.errors import KVLinkerError
from kvlinker_lab.load.traffic import random_text

CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_SAMPLE_CHARACTERS = (256, 1280)
"""The lengths of the two texts whose counts of tokens give the characters of a token."""


class ServerFailedError(KVLinkerError):
    """A server that was to be measured does not start, or does not answer as it should."""

    code = "server_failed"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and the model of requests."""

    url: str
    """The server's address, without ``/v1``."""
    model: str
    api_key: str | None = None

    @classmethod
    def find(cls, url: str, api_key: str | None = None) -> Self:
        """Ask a server for the first model that it serves. Raises ServerFailedError if it does not
        answer."""
        unnamed = cls(url.rstrip("/").removesuffix("/v1"), "", api_key)
        models = unnamed._json("GET", _MODELS)
        try:
            return cls(unnamed.url, str(models["data"][0]["id"]), api_key)
        except (LookupError, TypeError) as error:
            raise ServerFailedError(
                f"{unnamed.url}{_MODELS} lists no model: {models!r:.200}"
            ) from error

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def characters_per_token(self) -> float:
        """Learn from the server's own counts how many characters of random text make a token.

        Raises ServerFailedError if the server does not answer, or reports no counts.
        """
        generator = np.random.default_rng(0)
        few, many = (
            self._prompt_tokens(random_text(generator, length)) for length in _SAMPLE_CHARACTERS
        )
        if many <= few:
            raise ServerFailedError(
                f"{self.url} counts {many} tokens in a long prompt, and {few} in a short one."
            )
        return (_SAMPLE_CHARACTERS[1] - _SAMPLE_CHARACTERS[0]) / (many - few)

    def _prompt_tokens(self, text: str) -> int:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        }
        answer = self._json("POST", CHAT, body)
        try:
            return int(answer["usage"]["prompt_tokens"])
        except (LookupError, TypeError) as error:
            raise ServerFailedError(
                f"{self.url} does not report the tokens of a prompt."
            ) from error

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = httpx.request(
                method, f"{self.url}{path}", json=body, headers=self.headers, timeout=_TIMEOUT
            )
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            said = error_message(error.response)
            raise ServerFailedError(
                f"{self.url}{path} answers {error.response.status_code}: {said}"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerFailedError(
                f"No OpenAI-compatible server answers at {self.url}{path}: {error}."
            ) from error


def error_message(response: httpx.Response) -> str:
    """Return what an error's answer says, in OpenAI's words or as it stands, cut to 200
    characters."""
    try:
        return str(response.json()["error"]["message"])[:200]
    except (ValueError, LookupError, TypeError):
        return response.text[:200]
