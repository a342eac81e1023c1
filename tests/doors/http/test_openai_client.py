"""The official client works, and what it shows is what the engine did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from kvlinker.doors.http.answers.logprobs import token_key
from tests.doors.http.serving import MODEL_NAME, Served

GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
QUESTION: Any = [{"role": "user", "content": "Where is the cat?"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def python_answer(served: Served, messages: Any = QUESTION, **options: Any) -> Any:
    return served.llm.chat_completion(messages, temperature=0, ignore_eos=True, **options)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).owned_by == "kvlinker"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_chat_is_what_python_gives(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, max_tokens=8, **GREEDY)
    expected = python_answer(served, max_tokens=8)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_limits(client: openai.OpenAI, limit: str) -> None:
    limits: dict[str, Any] = {limit: 3}
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY, **limits)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_streamed_chat_is_the_whole_answer(served: Served, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        messages=QUESTION,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == python_answer(served, max_tokens=12).text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_async_client(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(messages=QUESTION, max_tokens=6, **GREEDY)
        stream = await client.chat.completions.create(
            messages=QUESTION, max_tokens=6, stream=True, **GREEDY
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content == python_answer(served, max_tokens=6).text


def test_several_choices(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        options = GREEDY | {"temperature": 1.5}
        answer = client.chat.completions.create(
            messages=QUESTION, max_tokens=8, n=3, seed=seed, **options
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask(5)
    assert len(set(first)) == 3
    assert ask(5) == first
    assert ask(99) != first


def test_several_streamed_choices_are_told_apart(client: openai.OpenAI) -> None:
    options: dict[str, Any] = (
        {"messages": QUESTION, "max_tokens": 8, "n": 2, "seed": 5} | GREEDY | {"temperature": 1.5}
    )
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_chat_logprobs(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY
    )
    expected = python_answer(served, max_tokens=5, logprobs=3).logprobs
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == [entry.text for entry in expected]
    for entry, other in zip(content, expected, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob <= 0

    plain = client.chat.completions.create(messages=QUESTION, max_tokens=2, **GREEDY)
    assert plain.choices[0].logprobs is None


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 6, "logprobs": True} | GREEDY
    whole = client.chat.completions.create(**options).choices[0].logprobs
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(stream=True, **options)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert whole is not None
    assert whole.content is not None
    assert streamed == [entry.token for entry in whole.content]


def test_completion_logprobs(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="The cat", max_tokens=4, logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == 4
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or answer.choices[0].text.startswith(token, offset)
    expected = served.llm.completion(
        "The cat", max_tokens=4, logprobs=2, temperature=0, ignore_eos=True
    ).logprobs
    name = partial(token_key, bytes_of=served.llm.token_bytes, as_ids=False)
    for alternatives, entry in zip(logprobs.top_logprobs, expected, strict=True):
        assert alternatives == pytest.approx(
            {name(one): one.logprob for one in (entry, *entry.top)}, abs=1e-5
        )


@pytest.mark.parametrize("as_list", [False, True])
def test_stop(client: openai.OpenAI, as_list: bool) -> None:
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12} | GREEDY
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text
    stop = text[4:7]
    answer = client.chat.completions.create(
        stop=[stop, "never said"] if as_list else stop, **options
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


def test_linked_chat(served: Served, client: openai.OpenAI) -> None:
    ids = served.cache(
        "The cat sat on the mat. It was fine!", "numbers 1 2 3 and more words: alpha, beta, gamma"
    )
    content: Any = [
        {"type": "text", "text": "Two texts: "},
        {"type": "context_cache", "id": ids[1]},
        {"type": "text", "text": " and "},
        {"type": "context_cache", "id": ids[0]},
        {"type": "text", "text": "What is it?"},
    ]
    lengths = {}
    for policy, recomputed in (("full", None), ("naive", 0), ("legolink-2", 4)):
        extra = {"ignore_eos": True, "link": {"policy": policy}}
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": content}],
            max_tokens=4,
            **GREEDY | {"extra_body": extra},
        )
        assert answer.usage is not None
        details: Any = answer.usage.prompt_tokens_details
        chunk_tokens = sum(
            served.get(f"/v1/context_caches/{cache_id}").json()["tokens"] for cache_id in ids
        )
        expected = chunk_tokens if recomputed is None else recomputed
        assert (details.recomputed_tokens, details.cached_tokens) == (
            expected,
            chunk_tokens - expected,
        ), policy
        lengths[policy] = answer.usage.prompt_tokens
    assert len(set(lengths.values())) == 1


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=QUESTION, extra_body={"link": {"policy": "nope"}}, model=MODEL_NAME
        )
    assert (caught.value.code, caught.value.param) == ("invalid_policy", "link.policy")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
