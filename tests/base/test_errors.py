"""Errors have the same words in the library, the server and the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvlinker
from kvlinker import Client
from kvlinker.base.errors import (
    ContextCacheNotFoundError,
    ContextLengthError,
    did_you_mean,
)
from tests.doors.http.serving import Served

ROUTE = re.compile(r"(GET|POST|DELETE|PATCH) /|/v1/")
ABOVE = ("doors/http/", "cli/", "quality/")


def strings_below_the_server() -> Iterator[tuple[str, str]]:
    """Yield each line of code below the doors that names a route, with its file."""
    root = Path(kvlinker.__file__).parent
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        if name.startswith(ABOVE):
            continue
        for line in file.read_text().splitlines():
            if ROUTE.search(line):
                yield name, line.strip()


def test_no_error_below_the_server_names_a_route() -> None:
    assert list(strings_below_the_server()) == []


def test_the_library_the_server_and_its_client_say_the_same(served: Served) -> None:
    long = "a" * 10_000_000
    messages = []
    with Client(served.url) as client:
        for door in (served.llm, client):
            with pytest.raises(ContextLengthError) as caught:
                door.generate_context_cache(long)
            with pytest.raises(ContextCacheNotFoundError) as missing:
                door.read_cache("cc_none")
            messages.append([str(caught.value), str(missing.value)])
    messages.append(
        [
            served.post("/v1/context_caches", {"chunks": [long]}).json()["error"]["message"],
            served.get("/v1/context_caches/cc_none").json()["error"]["message"],
        ]
    )
    assert messages[0] == messages[1] == messages[2]
    assert messages[0][0].endswith("Shorten it, or split it into chunks.")
    assert messages[0][1].endswith("Create it again.")


def test_a_long_word_has_no_near_one() -> None:
    """Comparing takes time that grows with its length."""
    assert did_you_mean("max_token", ["max_tokens"]) == " Did you mean 'max_tokens'?"
    assert did_you_mean("max_tokens" * 1_000_000, ["max_tokens"]) == ""
