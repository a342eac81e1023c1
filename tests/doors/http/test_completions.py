"""Prompts of every shape, usage that adds up, and where the time went."""

from __future__ import annotations

import json
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


def own_bytes(name: str) -> bytes:
    """The bytes of a token by its name in log probabilities."""
    if not name.startswith("bytes:"):
        return name.encode()
    return bytes(int(each, 16) for each in re.findall(r"\\x([0-9a-f]{2})", name))


SMILING = "a\U0001f600\u00e9 \u4e2d!"


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_have_their_own_bytes_and_places(served: Served, stream: bool) -> None:
    asked = {
        "prompt": "Hi",
        "max_tokens": 40,
        "logprobs": 5,
        "structured_outputs": {"choice": [SMILING]},
        "stream": stream,
    }
    answer = served.post(PATH, asked)
    choices = [answer.json()["choices"][0]] if not stream else streamed(answer.text)
    assert "".join(choice["text"] for choice in choices) == SMILING
    told = [choice["logprobs"] for choice in choices]
    tokens = [token for each in told for token in each["tokens"]]
    joined = [own_bytes(token) for token in tokens]
    assert b"".join(joined) == SMILING.encode()
    assert any(token.startswith("bytes:\\x") for token in tokens)
    offsets = [offset for each in told for offset in each["text_offset"]]
    before = [b"".join(joined[:index]) for index in range(len(joined))]
    assert offsets == [len(each.decode(errors="ignore")) for each in before]
    tops = [top for each in told for top in each["top_logprobs"]]
    for token, top in zip(tokens, tops, strict=True):
        assert token in top
        assert len(top) in (5, 6)


def streamed(text: str) -> list[dict[str, Any]]:
    """The choices of a stream's chunks that have log probabilities."""
    lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [choice for choice in choices if choice["logprobs"]["tokens"]]


def test_an_echo_is_counted_by_its_own_characters(served: Served) -> None:
    prompt = "The \u00e9 cat"
    body = complete(served, prompt, echo=True, logprobs=0)
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == served.llm.tokenizer.bos_token
    places = zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True)
    for token, offset in places:
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset)
    assert logprobs["text_offset"][:2] == [0, 0]
    assert logprobs["text_offset"][-4] == len(prompt)


def test_the_token_that_ends_an_answer_is_told_everywhere(served: Served) -> None:
    """As vLLM does: an entry for each of the tokens that usage counts."""
    ending = served.llm.tokenizer.eos_token_id
    common = {"max_tokens": 5, "logit_bias": {ending: 100}, "return_token_ids": True}
    messages = [{"role": "user", "content": "Hi"}]
    body = served.post(PATH, {"prompt": "Hi", "logprobs": 1, **common}).json()
    text = body["choices"][0]
    assert (text["text"], text["token_ids"]) == ("", [ending])
    assert text["logprobs"]["tokens"] == [served.llm.tokenizer.eos_token]
    assert text["logprobs"]["text_offset"] == [0]
    chat = served.post(
        "/v1/chat/completions", {"messages": messages, "logprobs": True, **common}
    ).json()
    choice = chat["choices"][0]
    assert (choice["message"]["content"], choice["token_ids"]) == ("", [ending])
    (entry,) = choice["logprobs"]["content"]
    assert entry["token"] == served.llm.tokenizer.eos_token
    assert body["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"] == 1
