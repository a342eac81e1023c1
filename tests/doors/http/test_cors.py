"""Pages of the origins that are set may call the server from browsers; others may not."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.settings import load_settings
from tests.doors.http.serving import Served, serving

ASKED = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type, x-api-key",
}
FRIEND = {"Origin": "https://friend.example"}
STRANGER = {"Origin": "https://stranger.example"}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def opened(served: Served) -> Iterator[Served]:
    """The same LLM behind keys, for the pages of one origin."""
    changes = {"api_keys": ("key-alpha",), "cors_origins": ("https://friend.example",)}
    with serving(
        served.llm, served.llm.settings.model_copy(update=changes), closes=False
    ) as running:
        yield running


def test_a_friends_page_may_call(opened: Served) -> None:
    answer = httpx.options(f"{opened.url}/v1/messages", headers=FRIEND | ASKED)
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, "https://friend.example")
    assert "x-api-key" in answer.headers["access-control-allow-headers"]
    read = opened.get("/v1/models", headers=FRIEND | {"Authorization": "Bearer key-alpha"})
    assert read.headers[ALLOWED] == "https://friend.example"
    assert "X-Request-Id" in read.headers["access-control-expose-headers"]


def test_errors_can_be_read(opened: Served) -> None:
    answer = opened.get("/v1/models", headers=FRIEND)
    assert (answer.status_code, answer.headers[ALLOWED]) == (401, "https://friend.example")


def test_strangers_pages_may_not(opened: Served, served: Served) -> None:
    answer = httpx.options(f"{opened.url}/v1/messages", headers=STRANGER | ASKED)
    assert answer.status_code == 400
    assert ALLOWED not in answer.headers
    assert ALLOWED not in served.get("/v1/models", headers=FRIEND).headers


@pytest.mark.parametrize(
    "origin", ["friend.example", "https://friend.example/", "https://a b", "https://u@f.example"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidRequestError, match="cors_origins"):
        load_settings(cors_origins=origin)
    assert load_settings(cors_origins="*, http://localhost:3000").cors_origins == (
        "*",
        "http://localhost:3000",
    )
