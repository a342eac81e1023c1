"""Answers that become context caches, over HTTP: kept, found, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.toy_models import loaded_model

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "Where is the cat?"}
SAYING = "The cat sleeps in the kitchen, below the green kettle of the old house."
KEEP = {"keep": "answer"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = tiny_settings(tmp_path, policy="naive", prefix_cache="on")
    with serving(LLM.from_model(loaded_model("llama"), settings), settings) as server:
        yield server


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    """A request that is answered with ``SAYING``."""
    return {"messages": [QUESTION, *messages], "guided_choice": [SAYING], **fields}


def kept(served: Served, **fields: Any) -> dict[str, Any]:
    """What an answer tells of the context cache that it has become."""
    answer = served.post(CHAT, body(link=KEEP, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == SAYING
    told: dict[str, Any] = answer.json()["link"]["answer"]
    return told


def linked(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json().get("link", {}).get("context_caches", ())]


def handed_over(text: str = SAYING, **fields: Any) -> dict[str, Any]:
    """Another agent's prompt, which has the text within a text of its own."""
    content = f"The first agent says: {text} Is that so?"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def test_an_answer_becomes_a_context_cache(served: Served) -> None:
    told = kept(served)
    assert told["tokens"] == len(SAYING)  # the model's tokens are bytes
    described = served.get(f"/v1/context_caches/{told['id']}").json()
    assert described["contextual"] is True
    assert described["implicit"] is True
    assert described["tokens"] == told["tokens"]
    content = served.get(f"/v1/context_caches/{told['id']}/content").json()
    assert content["text"] == SAYING
    parts = [{"type": "context_cache", "id": told["id"]}, {"type": "text", "text": " Really?"}]
    answer = served.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2})
    assert linked(answer) == [told["id"]]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == told["tokens"]
    assert served.http.delete(f"/v1/context_caches/{told['id']}").status_code == 200
    assert linked(served.post(CHAT, handed_over())) == []


def test_nothing_is_kept_unless_asked_for(served: Served) -> None:
    answer = served.post(CHAT, body()).json()
    assert "link" not in answer
    assert served.get("/v1/context_caches").json()["data"] == []


@pytest.mark.parametrize("implicit", ["marked", "auto"])
def test_its_text_is_found_in_other_prompts(served: Served, implicit: str) -> None:
    told = kept(served)
    link = {"implicit": implicit}
    for messages in (
        handed_over()["messages"],
        [{"role": "system", "content": f"Know this: {SAYING}"}, QUESTION],
        [QUESTION | {"content": "Hello"}, {"role": "assistant", "content": SAYING}, QUESTION],
    ):
        answer = served.post(CHAT, {"messages": messages, "max_tokens": 2, "link": link})
        assert linked(answer) == [told["id"]]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= told["tokens"]
    off = served.post(CHAT, handed_over(link={"implicit": "off"}))
    assert linked(off) == []


def test_what_was_sampled_in_other_tokens_than_its_text_has_is_found_by_id_alone(
    tmp_path: Path,
) -> None:
    settings = tiny_settings(tmp_path, policy="naive")
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        asked = {"messages": [QUESTION], "max_tokens": 60, "return_token_ids": True, "seed": 8}
        answer = served.post(CHAT, {**asked, "link": KEEP, "ignore_eos": True}).json()
        (choice,) = answer["choices"]
        text = choice["message"]["content"]
        assert tuple(choice["token_ids"]) != served.llm.token_ids(text)
        cache_id = answer["link"]["answer"]["id"]
        assert linked(served.post(CHAT, handed_over(text))) == []
        parts = [{"type": "context_cache", "id": cache_id}]
        named = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        assert linked(served.post(CHAT, named)) == [cache_id]


def test_its_own_conversation_goes_on_as_it_was_computed(served: Served) -> None:
    told = kept(served)
    turns = [QUESTION, {"role": "assistant", "content": SAYING}, QUESTION]
    answer = served.post(CHAT, {"messages": turns, "max_tokens": 2})
    assert linked(answer) == []
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["exact_cached_tokens"] >= told["tokens"]


def test_a_chunk_that_was_computed_alone_goes_first(served: Served) -> None:
    kept(served)
    (alone,) = served.cache(SAYING)
    assert linked(served.post(CHAT, handed_over())) == [alone]


def test_every_dialect_tells_it_whole_and_at_the_end_of_streams(served: Served) -> None:
    """The clients' own types take what is told."""
    question = str(QUESTION["content"])
    kept_before = kept(served)["id"]
    completion = served.post(
        "/v1/completions", {"prompt": "Where?", "max_tokens": 9, "link": KEEP, "ignore_eos": True}
    ).json()
    assert completion["link"]["answer"]["tokens"] == 9
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        *_, last = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            stream=True,
            extra_body={"guided_choice": [SAYING], "link": KEEP},
        )
        assert last.choices[0].finish_reason == "stop"
        # the same answer behind the same prompt is the same chunk
        assert told(last)["id"] == kept_before
        asked: dict[str, Any] = {
            "model": "tiny",
            "max_output_tokens": 9,
            "input": question,
            "extra_body": {"link": KEEP},
        }
        assert told(client.responses.create(**asked))["id"]
        *_, completed = client.responses.create(**asked, stream=True)
        assert told(completed.response)["id"]
    with anthropic.Anthropic(base_url=served.url, api_key="none") as other:
        asked = {
            "model": "tiny",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": question}],
            "extra_body": {"link": KEEP},
        }
        assert told(other.messages.create(**asked))["id"]
        events = list(other.messages.create(**asked, stream=True))
        (ended,) = (event for event in events if event.type == "message_delta")
        assert told(ended)["id"]


def told(answer: Any) -> dict[str, Any]:
    """What an answer, or its last event, tells of the context cache that it has become."""
    found: dict[str, Any] = answer.to_dict()["link"]["answer"]
    return found


def test_bad_input(served: Served) -> None:
    for fields, param in (
        ({"link": {"keep": "answers"}}, "link.keep"),
        ({"link": {"keep": "answer", "ttl": "5 minutes"}}, "link.ttl"),
    ):
        answer = served.post(CHAT, body(**fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_of_several_answers_the_first_is_kept(served: Served) -> None:
    for stream in (False, True):
        asked = body(link=KEEP, n=3, stream=stream)
        assert served.post(CHAT, asked).status_code == 200
    fields = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    several = {"prompt": ["a", "b"], "n": 2, "link": KEEP} | fields
    answer = served.post("/v1/completions", several).json()["link"]["answer"]
    page = served.get("/v1/context_caches").json()["data"]
    assert {each["tokens"] for each in page} == {len(SAYING), 5}
    assert len(page) == 2
    assert answer["id"] in {each["id"] for each in page}


def test_a_request_that_is_left_keeps_nothing(served: Served) -> None:
    asked = {"messages": [QUESTION], "ignore_eos": True, "link": KEEP, "stream": True}
    with served.http.stream("POST", CHAT, json=asked) as stream:
        next(stream.iter_lines())
    served.wait_until_idle()
    assert served.get("/v1/context_caches").json()["data"] == []


def test_what_calls_is_kept_by_what_it_says_or_as_a_whole(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = {"messages": [QUESTION], "tools": [tool], "tool_choice": "required", "max_tokens": 40}
    answer = served.post(CHAT, {**asked, "link": KEEP}).json()["link"]["answer"]
    assert answer == {"id": None, "tokens": 0, "reason": "It says nothing."}
    whole = served.post(CHAT, {**asked, "link": {"keep": "all"}}).json()["link"]["answer"]
    assert whole["tokens"] > 0


def test_quotas_and_tenants(tmp_path: Path) -> None:
    settings = tiny_settings(
        tmp_path,
        policy="naive",
        api_keys="one,two",
        tenant_quotas={"two": {"bytes": "1kB"}},
        keep_answers="answer",
    )
    one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
    with serving(LLM.from_model(loaded_model("llama"), settings), settings) as served:
        first = served.post(CHAT, body(), headers=one).json()["link"]["answer"]
        assert first["id"]
        assert served.get(f"/v1/context_caches/{first['id']}", headers=two).status_code == 404
        over = handed_over(link={"keep": "off"})
        assert linked(served.post(CHAT, over, headers=two)) == []
        assert linked(served.post(CHAT, over, headers=one)) == [first["id"]]
        salted = served.post(CHAT, {**over, "cache_salt": "x"}, headers=one)
        assert linked(salted) == []
        second = served.post(CHAT, body(), headers=two).json()["link"]["answer"]
        assert second["id"] is None
        assert "quota" in second["reason"]
        assert served.get("/v1/context_caches", headers=two).json()["data"] == []


def test_what_is_over_quota_drives_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(tmp_path, policy="naive", tenant_quota_bytes="1kB")
    with serving(LLM.from_model(loaded_model("llama"), settings), settings) as served:
        stored: list[str] = []
        monkeypatch.setattr(served.llm.store, "put", lambda key, kv: stored.append(key))
        assert "quota" in kept(served)["reason"]
        assert not stored


def test_it_outlasts_the_server_and_the_loss_of_its_kv(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, policy="naive")
    with serving(LLM.from_model(loaded_model("llama"), settings), settings) as served:
        told = kept(served)
        expected = served.post(CHAT, handed_over(logprobs=True, temperature=0)).json()["choices"]
    with serving(LLM.from_model(loaded_model("llama"), settings), settings) as served:
        again = served.post(CHAT, handed_over(logprobs=True, temperature=0))
        assert linked(again) == [told["id"]]
        assert again.json()["choices"] == expected
        cache = served.llm.caches.get(told["id"], tenant="default")
        served.llm.store.delete(cache.chunk_key)
        healed = served.post(CHAT, handed_over(logprobs=True, temperature=0))
        assert linked(healed) == [], "its tokens are computed as a part of the prompt"
        details = healed.json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == details["recomputed_tokens"] == 0
        assert healed.json()["usage"]["prompt_tokens"] == again.json()["usage"]["prompt_tokens"]
