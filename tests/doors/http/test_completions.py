"""Prompts of every shape, usage that adds up, and where the time went."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.doors.http.serving import CONTEXT_WINDOW, MODEL_NAME, Served

PATH = "/v1/completions"


def complete(served: Served, prompt: Any, **options: Any) -> dict[str, Any]:
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True} | options
    answer = served.post(PATH, {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_text_is_what_python_gives(served: Served) -> None:
    body = complete(served, "The cat sat")
    expected = served.llm.completion("The cat sat", max_tokens=4, temperature=0, ignore_eos=True)
    assert body["choices"] == [
        {
            "index": 0,
            "text": expected.text,
            "logprobs": None,
            "finish_reason": "length",
            "prompt_logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
    ]
    assert (body["object"], body["model"]) == ("text_completion", MODEL_NAME)


def test_default_length_is_that_of_openai(served: Served) -> None:
    answer = served.post(PATH, {"prompt": "The cat", "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_token_ids_are_taken_as_they_are(served: Served) -> None:
    tokens = served.post("/tokenize", {"prompt": "The cat sat"}).json()["tokens"]
    assert complete(served, tokens)["choices"] == complete(served, "The cat sat")["choices"]
    assert complete(served, tokens)["usage"]["prompt_tokens"] == len(tokens)


def test_parts(served: Served) -> None:
    (cache_id,) = served.cache("The cat sat on the mat. It was fine!")
    parts = [{"type": "text", "text": "Look: "}, {"type": "context_cache", "id": cache_id}]
    naive = complete(served, parts, link={"policy": "naive"})
    details = naive["usage"]["prompt_tokens_details"]
    assert details["recomputed_tokens"] == 1  # the last token's logits are needed
    assert (
        details["cached_tokens"]
        == served.get(f"/v1/context_caches/{cache_id}").json()["tokens"] - 1
    )


@pytest.mark.parametrize("prompts", [["The cat", "A dog", "numbers"], [[5, 6, 7], [8, 9], [10]]])
def test_several_prompts_keep_their_order(served: Served, prompts: list[Any]) -> None:
    alone = [complete(served, prompt) for prompt in prompts]
    together = complete(served, prompts, n=2)
    texts = [body["choices"][0]["text"] for body in alone]
    assert [choice["text"] for choice in together["choices"]] == [
        text for text in texts for _ in range(2)
    ]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert together["usage"]["prompt_tokens"] == sum(
        body["usage"]["prompt_tokens"] for body in alone
    )
    assert together["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("n", [1, 3])
def test_usage_adds_up(served: Served, n: int) -> None:
    ids = served.cache("one two three four five six", "user assistant system question answer")
    parts = [{"type": "context_cache", "id": cache_id} for cache_id in ids] + [
        {"type": "text", "text": "So?"}
    ]
    prompt_tokens = served.post("/tokenize", {"prompt": parts}).json()["count"]
    usage = complete(served, parts, n=n, link={"policy": "legolink-3"})["usage"]
    fresh = served.post("/tokenize", {"prompt": "So?"}).json()["count"]
    details = usage["prompt_tokens_details"]
    assert (
        usage["prompt_tokens"]
        == prompt_tokens
        == details["cached_tokens"] + details["recomputed_tokens"] + fresh
    )
    assert details["recomputed_tokens"] == 6
    assert usage["completion_tokens"] == 4 * n
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_server_timing(served: Served, path: str) -> None:
    prompt: Any = (
        {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
    )
    answer = served.post(path, {**prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0})
    header = answer.headers["server-timing"]
    phases = dict(re.findall(r"(\w+);dur=([0-9.]+)", header))
    assert list(phases) == ["queue", "load", "link", "decode"]
    total = sum(map(float, phases.values()))
    assert float(phases["decode"]) > 0
    assert 0 < total <= answer.elapsed.total_seconds() * 1000


def test_tokenize(served: Served) -> None:
    text = served.post("/tokenize", {"text": "The cat sat"}).json()
    prompt = served.post("/tokenize", {"prompt": "The cat sat"}).json()
    chat = served.post(
        "/tokenize", {"messages": [{"role": "user", "content": "The cat sat"}]}
    ).json()
    assert text["count"] == len(text["tokens"])
    assert text["max_model_len"] == CONTEXT_WINDOW
    assert prompt["tokens"] == [served.llm.tokenizer.bos_token_id, *text["tokens"]]
    assert chat["count"] > prompt["count"]
    assert served.llm.tokenizer.decode(chat["tokens"]).endswith("assistant\n")


def test_developers_are_the_system(served: Served) -> None:
    def tokens(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        ids: list[int] = served.post("/tokenize", {"messages": messages}).json()["tokens"]
        return ids

    assert tokens("developer") == tokens("system") != tokens("assistant")


@pytest.mark.parametrize("name", [None, "default", MODEL_NAME])
def test_names_of_the_model(served: Served, name: str | None) -> None:
    assert complete(served, "a", model=name)["model"] == MODEL_NAME
