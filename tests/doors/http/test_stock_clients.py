"""Clients that know nothing of kvlinker see in ``usage`` what was reused: OpenAI's, in a chat loop
and with marks.

``tests/test_examples.py`` has LangChain's and LlamaIndex's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from kvlinker.llm import LLM
from tests.doors.http.serving import MODEL_NAME, Served, serving, tiny_model, tiny_settings

GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 6}
HANDBOOK = "\n".join(
    f"Rule {number}: whoever is late brings {number} cakes for all." for number in range(12)
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server as it is by default, with reuse of prefixes."""
    settings = tiny_settings(tmp_path_factory.mktemp("state"), prefix_cache="on")
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def cached(usage: CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def asked(client: openai.OpenAI, messages: Any, **options: Any) -> openai.types.chat.ChatCompletion:
    answer: openai.types.chat.ChatCompletion = client.chat.completions.create(
        messages=messages, **GREEDY, **options
    )
    return answer


def test_a_plain_chat_loop(client: openai.OpenAI) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief, and mind the rules of the house."}
    ]
    usages = []
    for question in ("Who brings cakes?", "How many of them?", "And who is never late?"):
        messages.append({"role": "user", "content": question})
        answer = asked(client, messages)
        usages.append(answer.usage)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    for before, after in pairwise(usages):
        assert before is not None
        assert cached(after) >= before.prompt_tokens - 8, "all but the seam behind the last answer"


def test_a_streamed_chat_loop(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "A question that is streamed, and then streamed again."}
    ]
    usages = []
    for _ in range(2):
        events = client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        usages += [event.usage for event in events if event.usage is not None]
    first, second = usages
    assert (cached(first), cached(second)) == (0, first.prompt_tokens - 1)


def test_marks_of_openai_and_of_anthropic(client: openai.OpenAI) -> None:
    def ask(mark: dict[str, Any], before: str) -> openai.types.chat.ChatCompletion:
        parts = [{"type": "text", "text": before}, {"type": "text", "text": HANDBOOK, **mark}]
        return asked(client, [{"role": "user", "content": parts}])

    first = ask({"cache_control": {"type": "ephemeral"}}, "Once more: ")
    second = ask(
        {"prompt_cache_breakpoint": {"mode": "explicit"}}, "Hello. What do the rules say? "
    )
    assert cached(first.usage) == 0
    (cache,) = second.model_extra["link"]["context_caches"]  # type: ignore[index]
    assert cached(second.usage) > 0.9 * cache["tokens"]


def test_documents_in_another_order(client: openai.OpenAI) -> None:
    documents = [
        {"title": f"House {house}", "text": f"{HANDBOOK}\nHouse {house}."} for house in "abc"
    ]
    question = [{"role": "user", "content": "Who brings cakes?"}]
    usages = []
    for order in (documents, documents[::-1]):
        usages.append(asked(client, question, extra_body={"documents": order}).usage)
    assert cached(usages[0]) < 20
    assert usages[1] is not None
    assert cached(usages[1]) > 0.8 * usages[1].prompt_tokens
