"""A misspelt keyword argument is refused by an error that names the nearest one, and a text alone
is one chunk."""

from __future__ import annotations

import asyncio
import inspect
from itertools import product
from typing import Any

import pytest

from kvlinker import LLM, AsyncClient, AsyncLLM, Client
from kvlinker.base.errors import InvalidRequestError, UnknownArgumentError
from tests.doors.http.serving import Served

HELLO: Any = [{"role": "user", "content": "Hi"}]
KINDS = ("LLM", "AsyncLLM", "Client", "AsyncClient")


def call(kind: str, served: Served, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a class of the Python API."""
    made: Any
    if kind == "LLM":
        return getattr(served.llm, method)(*args, **kwargs)
    if kind == "AsyncLLM":
        return asyncio.run(getattr(AsyncLLM.from_llm(served.llm), method)(*args, **kwargs))
    if kind == "Client":
        with Client(served.url) as made:
            return getattr(made, method)(*args, **kwargs)

    async def called() -> Any:
        async with AsyncClient(served.url) as made:
            return await getattr(made, method)(*args, **kwargs)

    return asyncio.run(called())


MISSPELT: list[tuple[str, Any, str, str]] = [
    ("chat_completion", (HELLO,), "max_token", "max_tokens"),
    ("chat_completion", (HELLO,), "polcy", "policy"),
    ("chat_completion", (HELLO,), "strem", "stream"),
    ("generate_context_cache", (["a"],), "ttls", "ttl"),
    ("generate_context_cache", (["a"],), "meta_data", "metadata"),
    ("search", ("a",), "limt", "limit"),
    ("list_caches", (), "scop", "scope"),
]


def test_the_nearest_argument_is_named(served: Served, subtests: pytest.Subtests) -> None:
    for kind, (method, arguments, wrong, meant) in product(KINDS, MISSPELT):
        if wrong == "max_token" and kind.endswith("Client"):
            continue  # it goes into the body, of which the server leaves out what it does not know
        with subtests.test(f"{kind}.{method}({wrong})"):
            with pytest.raises(UnknownArgumentError) as caught:
                call(kind, served, method, *arguments, **{wrong: "x"})
            assert repr(wrong) in str(caught.value)
            assert str(caught.value).endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize("method", ["completion", "chat_completion"])
def test_it_is_a_type_error_as_anywhere_in_python(served: Served, method: str) -> None:
    for kind in ("LLM", "AsyncLLM"):
        with pytest.raises(
            TypeError, match=rf"^{method}\(\) takes no argument 'temprature'. Did you mean 'temper"
        ):
            call(kind, served, method, HELLO, temprature=1)


def test_arguments_of_constructors() -> None:
    misspelt: Any = {"polcy": "full"}
    wrong: Any = {"modle": "m"}
    with pytest.raises(InvalidRequestError, match="Did you mean 'policy'"):
        LLM(**misspelt)
    with pytest.raises(InvalidRequestError, match="Did you mean 'model'"):
        AsyncLLM(**wrong)
    wrong = {"apikey": "k"}
    for kind in (Client, AsyncClient):
        with pytest.raises(TypeError, match="Did you mean 'api_key'"):
            kind("http://localhost:1", **wrong)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, Client, AsyncClient])
def test_every_public_call_checks_its_arguments(kind: Any) -> None:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        parameters = inspect.signature(method).parameters.values()
        if name.startswith("_") or any(p.kind is p.VAR_KEYWORD for p in parameters):
            continue
        waits = inspect.iscoroutinefunction(method)
        with pytest.raises(
            TypeError, match=rf"^{name}\(\) takes no argument"
        ):  # before it misses any
            asyncio.run(method(no_such=1)) if waits else method(no_such=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_alone_is_one_chunk(served: Served, kind: str) -> None:
    (cache,) = call(kind, served, "generate_context_cache", "hello world")
    content = call(kind, served, "read_cache", cache.id)
    assert content.text == "hello world"
