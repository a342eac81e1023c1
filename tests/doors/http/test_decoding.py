"""Fields that say how answers are decoded do what OpenAI and vLLM say that they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import GenerationConfig

from kvlinker.doors.http.answers.completions import DEFAULT_MAX_TOKENS
from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import (
    CONTEXT_WINDOW,
    MODEL_NAME,
    Served,
    serving,
    tiny_model,
    tiny_settings,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION: Any = [{"role": "user", "content": "Where is the cat?"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **options: Any) -> openai.types.chat.ChatCompletion:
    fields: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 8,
    }
    return client.chat.completions.create(**(fields | options))


def text_of(answer: openai.types.chat.ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_logit_bias_forces_and_forbids(served: Served, client: openai.OpenAI) -> None:
    (cat,) = served.llm.token_ids(" cat")
    assert text_of(ask(client, logit_bias={str(cat): 100}, max_tokens=3)) == " cat cat cat"
    plain = text_of(ask(client, extra_body={"ignore_eos": True}))
    banned = {str(token): -100 for token in served.llm.token_ids(plain)}
    assert set(text_of(ask(client, logit_bias=banned))) != set(plain)


def test_bad_words_do_not_come(served: Served, client: openai.OpenAI) -> None:
    (cat,) = served.llm.token_ids(" cat")
    biased = {"logit_bias": {str(cat): 90}, "max_tokens": 3}
    answer = text_of(ask(client, extra_body={"bad_words": ["cat"], "ignore_eos": True}, **biased))
    assert "cat" not in answer


def test_min_tokens_and_stop_tokens(served: Served, client: openai.OpenAI) -> None:
    (cat,) = served.llm.token_ids(" cat")
    bias = {"logit_bias": {str(cat): 100}}
    answer = ask(client, extra_body={"stop_token_ids": [cat]}, **bias)
    assert (text_of(answer), answer.choices[0].finish_reason) == ("", "stop")
    answer = ask(client, extra_body={"stop_token_ids": [cat], "min_tokens": 3}, **bias)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_an_echo_stands_before_the_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": "The cat sat",
        "temperature": 0,
        "max_tokens": 4,
    }
    plain = client.completions.create(**options).choices[0].text
    echoed = client.completions.create(echo=True, **options).choices[0]
    assert echoed.text == "The cat sat" + plain
    streamed = client.completions.create(echo=True, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "The cat sat" + plain


def test_an_echo_of_tokens_and_of_caches_is_their_text(served: Served) -> None:
    ids = list(served.llm.token_ids("a cat and a dog"))
    (cache_id,) = served.cache("The cat sat on the mat.")
    parts = [{"type": "context_cache", "id": cache_id}, {"type": "text", "text": " Yes."}]
    for prompt, text in ((ids, "a cat and a dog"), (parts, "The cat sat on the mat. Yes.")):
        answer = served.post(TEXT, {"prompt": prompt, "echo": True, "max_tokens": 0})
        assert answer.json()["choices"][0]["text"] == text
        assert answer.json()["usage"]["completion_tokens"] == 0


def test_an_echo_tells_how_likely_the_prompt_was(served: Served) -> None:
    """The way in which evaluation harnesses score texts."""
    body = {
        "prompt": "The cat sat on the mat.",
        "echo": True,
        "max_tokens": 1,
        "ignore_eos": True,
        "logprobs": 1,
    }
    answer = served.post(TEXT, body)
    logprobs = answer.json()["choices"][0]["logprobs"]
    scored = served.llm.score("The cat sat on the mat.")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(scored.logprobs.tolist(), abs=1e-5)
    assert all(len(top) in (1, 2) for top in logprobs["top_logprobs"][1:])
    assert logprobs["tokens"][0] == "<s>"
    assert "".join(logprobs["tokens"][1:-1]) == "The cat sat on the mat."


def test_an_echo_and_prompt_logprobs_tell_as_many_alternatives_as_each_asks_for(
    served: Served,
) -> None:
    body: dict[str, Any] = {
        "prompt": "The cat sat",
        "echo": True,
        "max_tokens": 0,
        "logprobs": 3,
        "prompt_logprobs": 1,
    }
    for given in (body, body | {"logprobs": 1, "prompt_logprobs": 3}):
        (choice,) = served.post(TEXT, given).json()["choices"]
        told = {
            "logprobs": choice["logprobs"]["top_logprobs"],
            "prompt_logprobs": choice["prompt_logprobs"],
        }
        for field, entries in told.items():
            assert entries[0] is None
            assert {len(entry) - given[field] for entry in entries[1:]} <= {
                0,
                1,
            }, "the token itself may be one of them"


def test_prompt_logprobs_begin_behind_the_last_context_cache(served: Served) -> None:
    (cache_id,) = served.cache("The cat sat on the mat.")
    content = [
        {"type": "context_cache", "id": cache_id},
        {"type": "text", "text": "Where was the cat?"},
    ]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "prompt_logprobs": 1,
    }
    answer = served.post(CHAT, body).json()
    told = answer["prompt_logprobs"]
    assert len(told) == answer["usage"]["prompt_tokens"]
    known = [entry for entry in told if entry is not None]
    assert told[-len(known) :] == known
    assert len(known) > 5
    for entry in known:
        assert all(
            value["logprob"] <= 0 and math.isfinite(value["logprob"]) for value in entry.values()
        )
    assert (
        served.post(CHAT, {"messages": QUESTION, "max_tokens": 1}).json()["prompt_logprobs"] is None
    )
    both = served.post(
        TEXT, {"prompt": ["The cat", "a dog sat"], "max_tokens": 0, "prompt_logprobs": 0}
    ).json()
    assert [len(choice["prompt_logprobs"]) for choice in both["choices"]] == [
        len(served.llm.token_ids(text)) + 1 for text in ("The cat", "a dog sat")
    ]


TEMPLATE = (
    "{% for m in messages %}{{ m.name ~ ': ' if m.name else '' }}{{ m.role }}{{ m.reasoning_content"
    " or '' }}{{ m.content }};{% endfor %}{% if mood %}({{ mood }}){% endif %}{% if"
    " add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tiny_settings(tmp_path_factory.mktemp("state"), chat_template=TEMPLATE)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


class TestTemplates:
    """Variables, names, and where the prompt ends."""

    @staticmethod
    def prompt(served: Served, *messages: Any, **fields: Any) -> str:
        body = {"messages": list(messages), "max_tokens": 1, "prompt_logprobs": 0} | fields
        answer = served.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        first, *entries = answer.json()["prompt_logprobs"]
        assert first is None
        return "".join(next(iter(entry.values()))["decoded_token"] for entry in entries)

    def test_variables(self, templated: Served) -> None:
        user = {"role": "user", "content": "hi"}
        assert self.prompt(templated, user).endswith(";>")
        kwargs = {"chat_template_kwargs": {"mood": "sad"}}
        assert self.prompt(templated, user, **kwargs).endswith("(sad)>")
        assert self.prompt(templated, user, add_generation_prompt=False).endswith("hi;")

    def test_an_answer_that_was_begun_goes_on(self, templated: Served) -> None:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I think"}]
        assert self.prompt(templated, *messages, continue_final_message=True).endswith(
            "assistantI think"
        )
        assert self.prompt(templated, *messages).endswith("I think;>")

    def test_names_and_reasoning_are_shown(self, templated: Served) -> None:
        named = {"role": "user", "content": "hi", "name": "ann"}
        assert "nn: user" in self.prompt(templated, named)
        thought = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
        assert "assistanthmyes;" in self.prompt(templated, named, thought)

    @pytest.mark.parametrize("name", ["colour", "tokenize", "messages", "bos_token"])
    def test_variables_that_it_lacks_mean_nothing(self, templated: Served, name: str) -> None:
        body = {"messages": QUESTION, "max_tokens": 1}
        plain = templated.post("/tokenize", {"messages": QUESTION}).json()["tokens"]
        given = {"chat_template_kwargs": {name: "x"}}
        assert templated.post("/tokenize", {"messages": QUESTION} | given).json()["tokens"] == plain
        answer = templated.post(CHAT, body | given)
        assert answer.status_code == 200
        assert answer.headers["X-Ignored-Fields"] == f"chat_template_kwargs.{name}"


class TestRecommendations:
    """Sampling parameters of ``generation_config.json`` hold where a request leaves them out."""

    @pytest.fixture(params=["auto", "off"])
    def recommending(
        self, request, tmp_path, monkeypatch
    ) -> Iterator[tuple[Served, FakeEngine, bool]]:
        engine = FakeEngine()
        monkeypatch.setattr("kvlinker.service.startup.EmbeddedEngine", lambda *_, **__: engine)
        monkeypatch.setattr(
            tiny_model().model,
            "generation_config",
            GenerationConfig(temperature=0.6, top_p=0.95, do_sample=True),
        )
        settings = tiny_settings(tmp_path, generation_config=request.param)
        with serving(LLM.from_model(tiny_model(), settings), settings) as running:
            yield running, engine, request.param == "auto"

    def test_they_are_defaults(self, recommending) -> None:
        served, engine, followed = recommending
        served.post(CHAT, {"messages": QUESTION, "max_tokens": 1})
        served.post(CHAT, {"messages": QUESTION, "max_tokens": 1, "temperature": 0, "top_p": None})
        served.llm.completion("a", max_tokens=1, top_p=0.5)
        found = [
            (request.sampling.temperature, request.sampling.top_p) for request in engine.requests
        ]
        assert found == (
            [(0.6, 0.95), (0.0, 0.95), (0.6, 0.5)] if followed else [(1, 1), (0, 1), (1, 0.5)]
        )


def test_answers_take_the_rest_of_the_window(faked: Served, engine: FakeEngine) -> None:
    faked.post(CHAT, {"messages": QUESTION, "max_tokens": 2})
    faked.post(TEXT, {"prompt": "a", "n": 1})
    assert [request.sampling.max_tokens for request in engine.requests] == [2, DEFAULT_MAX_TOKENS]
    assert CONTEXT_WINDOW > DEFAULT_MAX_TOKENS
