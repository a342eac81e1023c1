"""Fields and routes that other servers have do the same here, on both engines: vLLM's tests run
these, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import anthropic.types
import openai
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from kvlinker.llm import LLM
from kvlinker.prompting.answer_forms.form import AnswerForm
from tests.doors.http.serving import (
    MODEL_NAME,
    TEMPLATE,
    Served,
    serving,
    tiny_model,
    tiny_settings,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
QUESTION: Any = [{"role": "user", "content": "Where is the cat?"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "max_tokens": 6},
    TEXT: {"prompt": "Where is the cat?", "max_tokens": 6},
    MESSAGES: {"messages": QUESTION, "max_tokens": 6},
    RESPONSES: {"input": "Where is the cat?", "max_output_tokens": 6},
}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def reusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that reuses beginnings of prompts."""
    settings = tiny_settings(tmp_path_factory.mktemp("state"), prefix_cache="on")
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


def ask(served: Served, path: str = CHAT, /, **fields: Any) -> dict[str, Any]:
    answer = served.post(path, LEAST[path] | fields)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def stream(served: Served, path: str = CHAT, /, **fields: Any) -> list[dict[str, Any]]:
    answer = served.post(path, LEAST[path] | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    data = re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE)
    return [json.loads(event) for event in data]


def said(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_are_told_whole_and_in_streams(served: Served, path: str) -> None:
    whole = ask(served, path, return_token_ids=True, n=2, seed=1, **GREEDY)
    choice = whole["choices"][0]
    assert served.llm.tokenizer.decode(choice["token_ids"]) == said(whole)
    assert len(choice["token_ids"]) == 6
    prompt = (whole if path == CHAT else choice)["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    chunks = stream(served, path, return_token_ids=True, seed=1, **GREEDY)
    told = [token for chunk in chunks for each in chunk["choices"] for token in
            each.get("token_ids") or ()]  # fmt: skip
    assert told == choice["token_ids"]
    holders = chunks if path == CHAT else [c for chunk in chunks for c in chunk["choices"]]
    assert [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each] == [prompt]
    plain = ask(served, path)["choices"][0]
    assert plain["token_ids"] is None


def test_tokens_of_log_probabilities_may_be_ids(served: Served) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, **GREEDY}
    chat = ask(served, logprobs=True, top_logprobs=2, **fields)["choices"][0]
    names = [f"token_id:{token}" for token in chat["token_ids"]]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == names
    assert all(
        re.fullmatch(r"token_id:\d+", top["token"])
        for entry in chat["logprobs"]["content"]
        for top in entry["top_logprobs"]
    )
    text = ask(served, TEXT, logprobs=2, **fields)["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in text["tokens"])
    assert [name in top for name, top in zip(text["tokens"], text["top_logprobs"], strict=True)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_is_told_all_along(served: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(served, path, stream_options=options, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert (last["choices"], chunks[0]["usage"]["total_tokens"]) == (
        [],
        last["usage"]["prompt_tokens"] + counts[0],
    )


def test_allowed_tokens_alone_come(served: Served) -> None:
    tokens = [*served.llm.token_ids(" cat"), *served.llm.token_ids(" dog")]
    answer = ask(served, allowed_token_ids=tokens, return_token_ids=True, seed=3)["choices"][0]
    assert set(answer["token_ids"]) <= set(tokens)
    assert len(answer["token_ids"]) == 6
    refused = served.post(CHAT, LEAST[CHAT] | {"allowed_token_ids": [10**8]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_special_tokens_are_shown_where_they_are_wanted(served: Served) -> None:
    tokenizer = served.llm.tokenizer
    bias = {"logit_bias": {str(tokenizer.bos_token_id): 100}, "max_tokens": 2}
    assert said(ask(served, **bias)) == ""
    assert said(ask(served, skip_special_tokens=False, **bias)) == tokenizer.bos_token * 2
    ending = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "skip_special_tokens": False}
    assert said(ask(served, **ending)) == ""
    shown = said(ask(served, include_stop_str_in_output=True, **ending))
    assert shown == tokenizer.eos_token


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_is_shown_where_it_is_wanted(served: Served, path: str) -> None:
    (cat,) = served.llm.token_ids(" cat")
    bias = {"logit_bias": {str(cat): 100}, "stop": ["t c"]}
    assert said(ask(served, path, **bias)) == " ca"
    with_it = {"include_stop_str_in_output": True, **bias}
    assert said(ask(served, path, **with_it)) == " cat c"
    chunks = stream(served, path, **with_it)
    pieces = [each.get("delta", each) for chunk in chunks for each in chunk["choices"]]
    assert "".join(p.get("content") or p.get("text") or "" for p in pieces) == " cat c"


OLDER_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": 'root ::= "x" "y"'}, "xy"),
    ({"guided_json": {"enum": [12, 34]}}, "12|34"),
    ({"guided_json": '{"enum": [12, 34]}'}, "12|34"),
    (
        {
            "response_format": {
                "type": "json_object",
                "schema": {
                    "properties": {"a": {"enum": [5]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            }
        },
        r'\{\s*"a"\s*:\s*5\s*\}',
    ),
]


def test_forms_in_older_words_are_kept(served: Served, subtests: pytest.Subtests) -> None:
    for path, (form, pattern) in product((CHAT, TEXT), OLDER_FORMS):
        with subtests.test(path, form=form):
            blanks = {
                str(token): -100 for blank in " \n\t" for token in served.llm.token_ids(blank)
            }
            answer = ask(served, path, **form, max_tokens=60, temperature=0, logit_bias=blanks)
            assert re.fullmatch(pattern, said(answer))
            assert answer["choices"][0]["finish_reason"] == "stop"


def test_responses_sample_as_chat_completions_do(served: Served) -> None:
    fields = {"seed": 5, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True}
    chat = said(ask(served, **fields))
    assert spoken(ask(served, RESPONSES, **fields)) == chat
    (cat,) = served.llm.token_ids(" cat")
    bias = {"logit_bias": {str(cat): 100}, "stop": "t c"}
    assert spoken(ask(served, RESPONSES, **bias)) == " ca"
    assert spoken(ask(served, RESPONSES, guided_choice=["maybe"])) == "maybe"


def spoken(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    text: str = part["text"]
    return text


def test_responses_tell_log_probabilities(served: Served) -> None:
    chat = ask(served, logprobs=True, top_logprobs=2, **GREEDY)["choices"][0]
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **GREEDY}
    response = ask(served, RESPONSES, **wanted)
    told = response["output"][0]["content"][0]["logprobs"]
    names = [entry["token"] for entry in chat["logprobs"]["content"]]
    assert [entry["token"] for entry in told] == names
    assert [entry["logprob"] for entry in told] == pytest.approx(
        [entry["logprob"] for entry in chat["logprobs"]["content"]], abs=1e-4
    )
    events = stream(served, RESPONSES, **wanted)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry["token"] for e in deltas for entry in e["logprobs"]] == names
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert len(done["logprobs"]) == len(names)
    unasked = ask(served, RESPONSES, top_logprobs=2, **GREEDY)
    assert unasked["output"][0]["content"][0]["logprobs"] == []


def test_each_token_of_a_character_has_log_probabilities(served: Served) -> None:
    """Also of a character that the answer's end cuts: the model's tokens are bytes."""
    said = "é🦊!"
    wanted = {"include": ["message.output_text.logprobs"], "guided_choice": [said], **GREEDY}
    for most in (20, 4):
        response = ask(served, RESPONSES, max_output_tokens=most, **wanted)
        told = response["output"][0]["content"][0]["logprobs"]
        assert [bytes(entry["bytes"]) for entry in told] == [
            said.encode()[place : place + 1] for place in range(min(most, len(said.encode())))
        ]
        events = stream(served, RESPONSES, max_output_tokens=most, **wanted)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert [entry for e in deltas for entry in e["logprobs"]] == told
        for delta in deltas[:2]:
            own = b"".join(bytes(entry["bytes"]) for entry in delta["logprobs"])
            assert own.decode(errors="replace") == delta["delta"]


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_a_request_id_comes_back(served: Served, path: str) -> None:
    assert "mine-1" in ask(served, path, request_id="mine-1")["id"]


TAKEN = {
    "priority": 3,
    "user": "me",
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "service_tier": "auto",
    "best_of": 1,
    "verbosity": "medium",
    "reasoning_effort": "low",
    "include_reasoning": True,
    "use_beam_search": False,
    "chat_template_kwargs": {"colour": "red"},
    "truncate_prompt_tokens": None,
}


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_what_cannot_matter_is_taken(served: Served, path: str) -> None:
    plain, taken = (
        served.http.post(path, json=LEAST[path] | {"temperature": 0} | fields, params=query)
        for fields, query in (({}, {}), (TAKEN, {"api-version": "2026-01-01"}))
    )
    assert taken.status_code == 200, taken.text
    texts = [
        answer.json().get("choices") or answer.json().get("content") or answer.json().get("output")
        for answer in (plain, taken)
    ]
    assert re.sub(r'"id": "\w+"', "", json.dumps(texts[0])) == re.sub(
        r'"id": "\w+"', "", json.dumps(texts[1])
    )


def test_messages_have_fields_that_are_not_known(served: Served) -> None:
    turns = [
        *QUESTION,
        {"role": "assistant", "content": "Here.", "reasoning": "Hm.", "refusal": None,
         "audio": None, "annotations": [{"type": "url_citation"}], "mood": "good"},
        {"role": "user", "content": "Where?", "reasoning_content": "", "weight": 1},
    ]  # fmt: skip
    assert ask(served, messages=turns)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_to_templates_that_know_it(
    llm_with: Callable[[str], LLM], field: str
) -> None:
    shows = TEMPLATE.replace("{{ message", "{{ message.reasoning_content }}{{ message", 1)
    turns = [*QUESTION, {"role": "assistant", "content": "Here.", field: "I see a cat."}, *QUESTION]
    body = {"messages": turns, "max_tokens": 1, "return_token_ids": True}
    for template, there in ((shows, True), (TEMPLATE, False)):
        llm = llm_with(template)
        with serving(llm, llm.settings, closes=False) as running:
            answer = running.post(CHAT, body)
            assert answer.status_code == 200, answer.text
            prompt = llm.tokenizer.decode(answer.json()["prompt_token_ids"])
            assert ("I see a cat." in prompt) == there


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_a_salt_keeps_beginnings_apart(reusing: Served, path: str) -> None:
    field = {CHAT: "messages", MESSAGES: "messages", TEXT: "prompt", RESPONSES: "input"}[path]
    long = f"The cat of {path} sat on the mat and looked at us. " * 12
    given = {field: [{"role": "user", "content": long}] if field == "messages" else long}

    def reused(salt: str | None) -> int:
        usage = ask(reusing, path, **given, cache_salt=salt)["usage"]
        if path == MESSAGES:
            return int(usage["cache_read_input_tokens"])
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["exact_cached_tokens"])

    assert reused(None) == 0
    assert reused("a") == 0
    assert reused("b") == 0
    for salt in (None, "a", "b"):
        assert reused(salt) > 32


def test_a_salt_keeps_chunks_that_are_found_by_content_apart(served: Served) -> None:
    text = "A dog walked along the river until it was dark, and then it slept. " * 4
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "Who?"}]}]

    def used(salt: str | None) -> tuple[str, bool, int]:
        answer = ask(served, messages=turns, cache_salt=salt)
        (cache,) = answer["link"]["context_caches"]
        details = answer["usage"]["prompt_tokens_details"]
        return cache["id"], cache["created"], details["cached_tokens"]

    first = {salt: used(salt) for salt in (None, "a", "b")}
    assert [created for _, created, _ in first.values()] == [True, True, True]
    assert len({cache_id for cache_id, _, _ in first.values()}) == 3
    for salt, (cache_id, _, _) in first.items():
        found, created, cached = used(salt)
        assert (found, created) == (cache_id, False)
        assert cached > 0
    by_id = [{"role": "user", "content": [{"type": "context_cache", "id": first["a"][0]}]}]
    named = ask(served, messages=by_id, cache_salt="c")
    assert named["link"]["context_caches"][0]["created"] is False, "an id is found with any salt"
    assert served.get(f"/v1/context_caches/{first['a'][0]}").json()["usable"] is True


def test_ids_are_texts_again(served: Served) -> None:
    made = served.post("/tokenize", {"prompt": "a cat", "return_token_strs": True}).json()
    assert len(made["token_strs"]) == made["count"]
    text = served.post("/detokenize", {"tokens": made["tokens"]}).json()["prompt"]
    assert text == served.llm.tokenizer.decode(made["tokens"])
    plain = served.post("/tokenize", {"prompt": "a cat", "add_special_tokens": False}).json()
    assert plain["tokens"] == list(served.llm.token_ids("a cat"))
    bos = served.llm.tokenizer.bos_token_id
    with_bos = served.post("/tokenize", {"text": "a cat", "add_special_tokens": True}).json()
    assert with_bos["tokens"] == made["tokens"] == [bos, *plain["tokens"]]
    assert served.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    refused = served.post("/detokenize", {"tokens": [10**8]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    answers = [
        ask(served, TEXT, prompt="a cat", add_special_tokens=special)["usage"]["prompt_tokens"]
        for special in (True, False)
    ]
    assert answers == [made["count"], plain["count"]]


def test_probes_and_the_version_are_told(served: Served) -> None:
    assert served.get("/ping").json() == {"status": "ok"}
    assert re.fullmatch(r"\d+\.\d+.*", served.get("/version").json()["version"])
    fingerprint = ask(served)["system_fingerprint"]
    assert fingerprint.startswith("kvlinker-")
    assert fingerprint.endswith(served.llm.engine.fingerprint[:12])
    assert {chunk["system_fingerprint"] for chunk in stream(served, TEXT)} == {fingerprint}


@pytest.mark.parametrize("path", LEAST)
def test_routes_are_answered_without_their_version(served: Served, path: str) -> None:
    short = served.post(path.removeprefix("/v1"), LEAST[path])
    assert short.status_code == 200, short.text
    assert short.json().keys() == ask(served, path).keys()
    wrong = served.post(path.removeprefix("/v1"), {})
    assert wrong.json().keys() == served.post(path, {}).json().keys(), "in the words of its API"


def test_models_are_listed_without_their_version(served: Served) -> None:
    listed = served.get("/models").json()
    assert listed == served.get("/v1/models").json()
    assert served.get(f"/models/{MODEL_NAME}").json() == listed["data"][0]
    assert served.get("/models/other").status_code == 404


def test_a_model_may_have_several_names(served: Served) -> None:
    names = {"served_model_name": "one, two,one"}
    with serving(served.llm, served.llm.settings.model_copy(update=names), closes=False) as named:
        listed = named.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["one", "two"]
        assert named.get("/v1/models/two").json()["id"] == "two"
        for name in ("one", "two", "default", None, "gpt-4"):
            assert ask(named, model=name)["model"] == served.llm.model_name


OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "x"},
    "/v1/link/explain": {"prompt": "x"},
    "/v1/context_caches": {"chunks": ["x"]},
}


def test_a_strict_server_refuses_other_names(served: Served, subtests: pytest.Subtests) -> None:
    changes = {"served_model_name": "one", "strict_model": True}
    with serving(
        served.llm, served.llm.settings.model_copy(update=changes), closes=False
    ) as strict:
        for route in (*LEAST, *OTHERS):
            with subtests.test(route):
                answer = strict.post(route, (LEAST | OTHERS)[route] | {"model": "gpt-4"})
                assert answer.status_code == 404
                assert "--served-model-name" in answer.text
        assert ask(strict, model="one")["choices"]


EVERYTHING: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "seed": 1},
    TEXT: {"logprobs": 2, "return_token_ids": True, "seed": 1},
    MESSAGES: {"top_k": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "seed": 1},
}
TYPES: dict[str, tuple[Any, Any]] = {
    CHAT: (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    TEXT: (openai.types.Completion, openai.types.Completion),
    MESSAGES: (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    RESPONSES: (
        openai.types.responses.Response,
        openai.types.responses.ResponseStreamEvent,
    ),
}


@pytest.mark.parametrize("path", TYPES)
def test_the_clients_types_hold_strictly(served: Served, path: str) -> None:
    whole, event = (TypeAdapter(kind) for kind in TYPES[path])
    whole.validate_json(json.dumps(ask(served, path, **EVERYTHING[path])), strict=True)
    for each in stream(served, path, **EVERYTHING[path]):
        if path == TEXT:  # the client has the type of whole answers alone
            each["choices"][0]["finish_reason"] = each["choices"][0]["finish_reason"] or "stop"
        event.validate_json(json.dumps(each), strict=True)


def test_reasoning_ends_by_its_grammar(served: Served) -> None:
    (cat,) = served.llm.token_ids(" cat")
    template = "<|im_start|><tool_call><think>"
    form = AnswerForm.of(served.llm.tokenizer, template).limited(4)
    form = replace(form, marks={"<think>": served.llm.tokenizer.bos_token_id, "</think>": cat})
    assert form.can_limit_reasoning
    grammar = form.reasoning_grammar("<|im_start|>assistant\n<think>")
    answer = served.llm.completion(
        "Where?", grammar=grammar, max_tokens=12, seed=1, logit_bias={cat: -100}
    )
    assert answer.token_ids.index(cat) == 4, "at the end of what it may think, and not before"
    assert len(answer.token_ids) > 5


def test_the_bytes_of_parts_of_characters_are_their_own(served: Served) -> None:
    """Joined, they are the text; vLLM samples the token that ends it, too."""
    text = "日本 é 🦆"
    fields = {"structured_outputs": {"choice": [text]}, "max_tokens": 100, "temperature": 0}
    (choice,) = ask(served, logprobs=True, top_logprobs=2, **fields)["choices"]
    assert choice["message"]["content"] == text
    entries = choice["logprobs"]["content"]
    assert len(entries) > len(text)
    joined = bytes(byte for entry in entries for byte in entry["bytes"])
    assert joined.removesuffix(b"<|end|>") == text.encode()
