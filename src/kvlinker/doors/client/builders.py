"""Requests chunks from builders, which are other servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import httpx

from kvlinker.doors.client.wire import access_headers

BUILD = "v1/chunks/build"

logger = logging.getLogger(__name__)


class BuilderClient:
    """Speaks with builders over HTTP. Methods may be called from any thread."""

    def __init__(self, urls: Callable[[], Sequence[str]], api_key: str | None) -> None:
        """``urls`` returns the addresses of the present builders, which accept ``api_key``, an
        admin's key."""
        self.urls = urls
        self._client = httpx.Client(headers=access_headers(api_key), trust_env=False)

    def build(self, url: str, key: str, seconds: float) -> bool:
        """Ask a builder to compute a chunk into the shared tiers; return whether it did. Raises
        TimeoutError if it takes longer than ``seconds``, and ConnectionError if it is gone, or ends
        meanwhile."""
        try:
            answer = self._client.post(f"{url}/{BUILD}", json={"key": key}, timeout=seconds)
        except httpx.ReadTimeout as error:
            raise TimeoutError(f"It has not answered in {seconds:.1f} s.") from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: this client is closed
            raise ConnectionError(repr(error)) from error
        if not answer.is_success:
            logger.info("The builder %s answers %d.", url, answer.status_code)
        return answer.is_success

    def close(self) -> None:
        """End the requests under way."""
        self._client.close()
