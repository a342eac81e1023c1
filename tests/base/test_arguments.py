"""An unknown option is refused by an error that names it, and a text alone is one chunk."""

from __future__ import annotations

import asyncio
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


@pytest.mark.parametrize("kind", ["LLM", "AsyncLLM"])
def test_an_unknown_option_is_a_type_error_that_names_it(
    served: Served, kind: str, subtests: pytest.Subtests
) -> None:
    for method, content, wrong in (
        ("chat_completion", HELLO, "max_token"),
        ("completion", "Hi", "temprature"),
    ):
        with subtests.test(method):
            with pytest.raises(TypeError, match=f"There is no argument '{wrong}'. Did you") as hit:
                call(kind, served, method, content, **{wrong: 1})
            assert isinstance(hit.value, UnknownArgumentError)
            assert hit.value.param == wrong


def test_options_of_a_model_are_settings() -> None:
    misspelt: Any = {"polcy": "full"}
    for kind in (LLM, AsyncLLM):
        with pytest.raises(InvalidRequestError, match="Did you mean 'policy'"):
            kind(**misspelt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_alone_is_one_chunk(served: Served, kind: str) -> None:
    (cache,) = call(kind, served, "generate_context_cache", "hello world")
    content = call(kind, served, "read_cache", cache.id)
    assert content.text == "hello world"
