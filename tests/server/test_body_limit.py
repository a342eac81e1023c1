"""Bodies over the limit are refused, with and without an announced length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvlinker.server.errors import MAX_BODY_BYTES
from tests.server.serving import Served

PATH = "/v1/completions"


def blocks(size: int) -> Iterator[bytes]:
    block = b" " * 2**20
    for _ in range(size // len(block)):
        yield block


@pytest.mark.parametrize("announced", [True, False])
def test_too_large(served: Served, announced: bool) -> None:
    size = MAX_BODY_BYTES + 2**20
    content = b"".join(blocks(size)) if announced else blocks(size)
    answer = served.http.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("body_too_large", "invalid_request_error", None)
    assert served.get("/health").status_code == 200


def test_large_enough_for_large_prompts(served: Served) -> None:
    text = "word " * 400_000
    answer = served.post(PATH, {"prompt": text})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
