"""Errors speak in the words of the door that they come out of."""

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
    WayOut,
    did_you_mean,
    in_words_of,
)
from tests.doors.http.serving import Served

ROUTE = re.compile(r"(GET|POST|DELETE|PATCH) /|/v1/")
ABOVE = ("doors/http/", "cli/", "quality/")


def strings_below_the_server() -> Iterator[tuple[str, str]]:
    """Yield each line of code below the doors that names a route, with its file."""
    root = Path(kvlinker.__file__).parent
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        if name.startswith(ABOVE) or name == "base/errors.py":
            continue
        for line in file.read_text().splitlines():
            if ROUTE.search(line):
                yield name, line.strip()


def test_no_error_below_the_server_names_a_route() -> None:
    assert list(strings_below_the_server()) == []


def test_each_door_has_its_own_words(subtests: pytest.Subtests) -> None:
    for way in WayOut:
        with subtests.test(way.name):
            message = f"It went wrong. {way}"
            assert in_words_of("python", message) == message
            assert not ROUTE.search(message)
            told = in_words_of("http", message)
            assert "()" not in told
            assert in_words_of("python", told) == message
            assert (
                in_words_of("command", told)
                == in_words_of("command", message)
                == f"It went wrong. {way.command}"
            )


def test_the_library_speaks_of_its_calls_and_the_server_of_its_routes(served: Served) -> None:
    with pytest.raises(ContextCacheNotFoundError, match=r"with generate_context_cache\(\)\.$"):
        served.llm.read_cache("cc_none")
    answer = served.get("/v1/context_caches/cc_none")
    assert answer.json()["error"]["message"].endswith(
        "Create it again with POST /v1/context_caches."
    )


def test_a_client_speaks_as_the_library_does(served: Served) -> None:
    long = "a" * 10_000_000
    told = []
    with Client(served.url) as client:
        for door in (served.llm, client):
            with pytest.raises(ContextLengthError) as caught:
                door.generate_context_cache(long)
            told.append(str(caught.value))
            with pytest.raises(ContextCacheNotFoundError) as missing:
                door.read_cache("cc_none")
            told.append(str(missing.value))
    assert told[:2] == told[2:]
    assert str(WayOut.SPLIT) in told[0]
    assert (
        "POST /v1/context_caches takes 'input'"
        in served.post("/v1/context_caches", {"chunks": [long]}).json()["error"]["message"]
    )


def test_a_long_word_has_no_near_one() -> None:
    """Comparing takes time that grows with its length."""
    assert did_you_mean("max_token", ["max_tokens"]) == " Did you mean 'max_tokens'?"
    assert did_you_mean("max_tokens" * 1_000_000, ["max_tokens"]) == ""
