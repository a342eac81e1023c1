"""Bodies over the limit are refused, with and without an announced length, and those that come too
slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message

from kvlinker.base.types.limits import LEAST_PROMPT_BODY_BYTES, MAX_BODY_BYTES
from kvlinker.doors.http.edge.bodies import (
    prompt_body_bytes,
)
from kvlinker.doors.http.edge.guards import LEAST_BYTES_PER_SECOND, limit_body
from tests.doors.http.serving import Served

LIMITS = {"/v1/completions": LEAST_PROMPT_BODY_BYTES, "/v1/context_caches": MAX_BODY_BYTES}


def blocks(size: int) -> Iterator[bytes]:
    block = b" " * 2**20
    for _ in range(size // len(block)):
        yield block


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("path", LIMITS)
def test_too_large(served: Served, path: str, announced: bool) -> None:
    size = LIMITS[path] + 2**20
    content = b"".join(blocks(size)) if announced else blocks(size)
    answer = served.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "body_too_large",
        "invalid_request_error",
        None,
    )
    assert f"{LIMITS[path]:,} bytes" in error["message"]
    assert served.get("/health").status_code == 200


def test_prompts_of_large_windows_may_be_larger() -> None:
    assert prompt_body_bytes(131_072) == LEAST_PROMPT_BODY_BYTES
    assert prompt_body_bytes(2 * 2**20) == 32 * 2**20
    assert prompt_body_bytes(10**8) == MAX_BODY_BYTES


def test_large_enough_for_large_prompts(served: Served) -> None:
    text = "word " * 400_000
    answer = served.post("/v1/completions", {"prompt": text})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_bytes_that_come_give_time() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"a" * 10 * LEAST_BYTES_PER_SECOND, "more_body": True},
        {"type": "http.request", "body": b"b", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def arriving() -> AsyncIterator[Message]:
        for message in messages:
            yield message

    receive = limit_body(arriving().__anext__, Headers(), most=MAX_BODY_BYTES, seconds=0.01)
    assert [await receive() for _ in messages] == messages


async def test_nothing_gives_no_time() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(HTTPException) as caught:
        await limit_body(never, Headers(), most=MAX_BODY_BYTES, seconds=0.01)()
    assert caught.value.status_code == 408
