"""Every mistake has its status, code and parameter, and leaves the server as it was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from kvlinker.base.types.limits import MAX_INPUT_CHARACTERS
from tests.doors.http.serving import CONTEXT_WINDOW, MODEL_NAME, Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CACHES = "/v1/context_caches"
TOKENS = "/tokenize"

HELLO = [{"role": "user", "content": "Hello"}]
LONG = "word " * CONTEXT_WINDOW
UNKNOWN_ID = "cc_000000000000000000000000"


@dataclass(frozen=True)
class Case:
    """A request and what it is answered with. ``body`` is sent as JSON, unless it is bytes."""

    name: str
    method: str
    path: str
    body: Any
    status: int
    code: str
    param: str | None
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


def chat(name: str, code: str, param: str | None, /, *, status: int = 400, **fields: Any) -> Case:
    return Case(
        f"chat {name}",
        "POST",
        CHAT,
        {"messages": HELLO, "max_tokens": 1, **fields},
        status,
        code,
        param,
    )


def said(name: str, code: str, param: str, content: Any, /, *, status: int = 400) -> Case:
    return chat(name, code, param, status=status, messages=[{"role": "user", "content": content}])


def text(name: str, code: str, param: str | None, /, *, status: int = 400, **fields: Any) -> Case:
    return Case(
        f"completion {name}",
        "POST",
        TEXT,
        {"prompt": "a", "max_tokens": 1, **fields},
        status,
        code,
        param,
    )


def caches(name: str, code: str, param: str | None, /, *, status: int = 400, **fields: Any) -> Case:
    body = fields if "input" in fields or "chunks" in fields else {"chunks": ["a"], **fields}
    return Case(f"caches {name}", "POST", CACHES, body, status, code, param)


def change(name: str, code: str, param: str, /, **fields: Any) -> Case:
    return Case(f"change {name}", "PATCH", f"{CACHES}/{UNKNOWN_ID}", fields, 400, code, param)


def raw(
    name: str,
    code: str,
    body: bytes,
    /,
    *,
    path: str = CHAT,
    content_type: str = "application/json",
) -> Case:
    return Case(
        f"raw {name}", "POST", path, body, 400, code, None, (("Content-Type", content_type),)
    )


def route(
    name: str, method: str, path: str, status: int, code: str, param: str | None = None, /
) -> Case:
    return Case(name, method, path, None, status, code, param)


CASES = [
    # bodies
    raw("not JSON", "invalid_json", b"{"),
    raw("nothing", "missing_required_parameter", b""),
    raw(
        "invalid UTF-8", "invalid_json", b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'
    ),
    raw("a list", "invalid_type", b"[]"),
    raw("a number", "invalid_type", b"3", path=TEXT),
    raw("null", "invalid_type", b"null", path=CACHES),
    raw(
        "a form",
        "invalid_type",
        b'{"messages": []}',
        content_type="application/x-www-form-urlencoded",
    ),
    raw("nested without end", "invalid_json", b"[" * 100_000),
    raw("a number of 5000 digits", "invalid_json", b'{"n": ' + b"9" * 5000 + b"}"),
    # messages
    Case("chat without messages", "POST", CHAT, {}, 400, "missing_required_parameter", "messages"),
    chat("no message", "invalid_value", "messages", messages=[]),
    chat("messages of text", "invalid_type", "messages", messages="Hello"),
    chat("a message of text", "invalid_type", "messages.0", messages=["Hello"]),
    chat(
        "unknown role",
        "invalid_value",
        "messages.0.role",
        messages=[{"role": "robot", "content": "a"}],
    ),
    chat("no role", "missing_required_parameter", "messages.0.role", messages=[{"content": "a"}]),
    chat(
        "no content",
        "missing_required_parameter",
        "messages.0.content",
        messages=[{"role": "user"}],
    ),
    chat(
        "tool calls",
        "missing_required_parameter",
        "messages.0.tool_calls.0.function",
        messages=[{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
    ),
    said("content null", "invalid_type", "messages.0.content", None),
    said("content a number", "invalid_type", "messages.0.content", 7),
    said("content an object", "invalid_type", "messages.0.content", {"type": "text", "text": "a"}),
    said("a part of text", "invalid_type", "messages.0.content.0", ["Hello"]),
    said(
        "a part without type",
        "missing_required_parameter",
        "messages.0.content.0.type",
        [{"text": "a"}],
    ),
    said(
        "text a number", "invalid_type", "messages.0.content.0.text", [{"type": "text", "text": 5}]
    ),
    said(
        "text missing",
        "missing_required_parameter",
        "messages.0.content.0.text",
        [{"type": "text"}],
    ),
    said(
        "id missing",
        "missing_required_parameter",
        "messages.0.content.0.id",
        [{"type": "context_cache"}],
    ),
    said(
        "id a number",
        "invalid_type",
        "messages.0.content.0.id",
        [{"type": "context_cache", "id": 1}],
    ),
    said(
        "unknown id",
        "context_cache_not_found",
        "messages.0.content.1.id",
        [{"type": "text", "text": "a"}, {"type": "context_cache", "id": UNKNOWN_ID}],
        status=404,
    ),
    said(
        "an id that is none",
        "context_cache_not_found",
        "messages.0.content.0.id",
        [{"type": "context_cache", "id": "'; DROP TABLE chunks; --\0"}],
        status=404,
    ),
    said("lone surrogate", "invalid_value", "messages.0.content", "a \ud800 b"),
    said(
        "lone surrogate in a part",
        "invalid_value",
        "messages.0.content.0.text",
        [{"type": "text", "text": "\udfff"}],
    ),
    said(
        "an id of a lone surrogate",
        "invalid_value",
        "messages.0.content.0.id",
        [{"type": "context_cache", "id": "\udfff"}],
    ),
    said("over the context window", "context_length_exceeded", "messages", LONG),
    # sampling
    chat("temperature -1", "invalid_value", "temperature", temperature=-1),
    chat("temperature NaN", "invalid_value", "temperature", temperature=float("nan")),
    chat("temperature infinite", "invalid_value", "temperature", temperature=float("inf")),
    chat("temperature text", "invalid_type", "temperature", temperature="hot"),
    chat("temperature true", "invalid_type", "temperature", temperature=True),
    chat("top_p 2", "invalid_value", "top_p", top_p=2),
    chat("top_k -2", "invalid_value", "top_k", top_k=-2),
    chat("min_p 1.5", "invalid_value", "min_p", min_p=1.5),
    chat("repetition_penalty 0", "invalid_value", "repetition_penalty", repetition_penalty=0),
    chat("presence_penalty 3", "invalid_value", "presence_penalty", presence_penalty=3),
    chat("frequency_penalty -3", "invalid_value", "frequency_penalty", frequency_penalty=-3),
    chat("seed of 80 bits", "invalid_value", "seed", seed=2**80),
    chat("seed a fraction", "invalid_type", "seed", seed=0.5),
    chat("n 0", "invalid_value", "n", n=0),
    chat("n huge", "invalid_value", "n", n=10**9),
    chat("n text", "invalid_type", "n", n="2"),
    chat("max_tokens 0", "invalid_value", "max_tokens", max_tokens=0),
    chat("max_tokens -5", "invalid_value", "max_tokens", max_tokens=-5),
    chat(
        "max_completion_tokens 0", "invalid_value", "max_completion_tokens", max_completion_tokens=0
    ),
    chat("17 stop texts", "invalid_value", "stop", stop=["x"] * 17),
    chat("stop empty", "invalid_value", "stop", stop=""),
    chat("stop of numbers", "invalid_type", "stop.0", stop=[1]),
    chat("stop a number", "invalid_type", "stop", stop=1),
    chat("logprobs a number", "invalid_type", "logprobs", logprobs=3),
    chat("top_logprobs 21", "invalid_value", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("top_logprobs alone", "invalid_value", "top_logprobs", top_logprobs=2),
    chat("stream text", "invalid_type", "stream", stream="yes"),
    chat(
        "stream_options without stream",
        "invalid_value",
        "stream_options",
        stream_options={"include_usage": True},
    ),
    # linking
    chat("unknown policy", "invalid_policy", "link.policy", link={"policy": "wishful-3"}),
    chat("legolink-0", "invalid_policy", "link.policy", link={"policy": "legolink-0"}),
    chat("legolink-999999", "invalid_policy", "link.policy", link={"policy": "legolink-999999"}),
    chat("legolink-", "invalid_policy", "link.policy", link={"policy": "legolink-"}),
    chat("legolink--4", "invalid_policy", "link.policy", link={"policy": "legolink--4"}),
    chat("legolink-4.5", "invalid_policy", "link.policy", link={"policy": "legolink-4.5"}),
    chat("policy empty", "invalid_value", "link.policy", link={"policy": ""}),
    chat("policy a number", "invalid_type", "link.policy", link={"policy": 16}),
    chat("link of text", "invalid_type", "link", link="legolink-4"),
    chat("link misspelt", "unknown_parameter", "link.polcy", link={"polcy": "full"}),
    # what OpenAI has and this has not
    chat("model a lone surrogate", "invalid_value", "model", model="\ud800"),
    chat("model a number", "invalid_type", "model", model=4),
    chat("functions", "unsupported_parameter", "functions", functions=[{"name": "f"}]),
    chat(
        "an unknown form", "invalid_value", "response_format.type", response_format={"type": "xml"}
    ),
    chat(
        "no schema",
        "invalid_value",
        "response_format.json_schema",
        response_format={"type": "json_schema"},
    ),
    chat(
        "text under a schema",
        "invalid_value",
        "response_format.schema",
        response_format={"type": "text", "schema": {"type": "object"}},
    ),
    chat(
        "text under a JSON schema",
        "invalid_value",
        "response_format.json_schema",
        response_format={"type": "text", "json_schema": {"name": "n", "schema": {}}},
    ),
    chat(
        "a schema that is none",
        "invalid_type",
        "response_format.json_schema.schema",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": [1]}},
    ),
    chat(
        "a schema that cannot be enforced",
        "invalid_value",
        "response_format.json_schema.schema",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"not": {}}},
        },
    ),
    chat(
        "a regex that is none",
        "invalid_value",
        "structured_outputs.regex",
        structured_outputs={"regex": "("},
    ),
    chat(
        "a text that is no schema",
        "invalid_value",
        "structured_outputs.json",
        structured_outputs={"json": "{"},
    ),
    chat(
        "no choice", "invalid_value", "structured_outputs.choice", structured_outputs={"choice": []}
    ),
    chat(
        "two grammars",
        "invalid_value",
        "structured_outputs",
        structured_outputs={"regex": "a", "choice": ["a"]},
    ),
    chat("no grammar", "invalid_value", "structured_outputs", structured_outputs={}),
    chat(
        "a structural tag",
        "unsupported_parameter",
        "structured_outputs.structural_tag",
        structured_outputs={"structural_tag": "{}"},
    ),
    chat(
        "two forms",
        "invalid_value",
        "structured_outputs",
        response_format={"type": "json_object"},
        structured_outputs={"regex": "a"},
    ),
    chat("logit_bias of words", "invalid_value", "logit_bias.cat", logit_bias={"cat": 1}),
    chat("logit_bias of 101", "invalid_value", "logit_bias.5", logit_bias={"5": 101}),
    chat(
        "logit_bias of a token that there is not",
        "invalid_value",
        "logit_bias",
        logit_bias={"99999": 1},
    ),
    chat(
        "stop_token_ids that there are not",
        "invalid_value",
        "stop_token_ids",
        stop_token_ids=[99999],
    ),
    chat(
        "logit_bias of 71 bits", "invalid_value", f"logit_bias.{2**70}", logit_bias={str(2**70): 1}
    ),
    chat("stop_token_ids of 71 bits", "invalid_value", "stop_token_ids", stop_token_ids=[2**70]),
    chat("stop_token_ids of text", "invalid_type", "stop_token_ids.0", stop_token_ids=["a"]),
    chat("bad_words empty", "invalid_value", "bad_words.0", bad_words=[""]),
    chat("min_tokens over max_tokens", "invalid_value", "min_tokens", min_tokens=2),
    chat("prompt_logprobs 21", "invalid_value", "prompt_logprobs", prompt_logprobs=21),
    chat(
        "prompt_logprobs of a stream",
        "invalid_value",
        "prompt_logprobs",
        prompt_logprobs=1,
        stream=True,
    ),
    chat(
        "an answer to the last message and its continuation",
        "invalid_value",
        "continue_final_message",
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    chat(
        "a name that is no text",
        "invalid_type",
        "messages.0.name",
        messages=[HELLO[0] | {"name": 1}],
    ),
    chat(
        "a tool_call_id of a user",
        "unsupported_parameter",
        "messages.0.tool_call_id",
        messages=[HELLO[0] | {"tool_call_id": "call_1"}],
    ),
    chat("no allowed token", "invalid_value", "allowed_token_ids", allowed_token_ids=[]),
    chat(
        "an allowed token that there is not",
        "invalid_value",
        "allowed_token_ids",
        allowed_token_ids=[10**6],
    ),
    chat(
        "two old forms",
        "invalid_value",
        "guided_regex",
        guided_regex="a",
        guided_choice=["a"],
    ),
    text(
        "echo of logprobs in a stream", "invalid_value", "echo", echo=True, logprobs=1, stream=True
    ),
    text("suffix", "unsupported_parameter", "suffix", suffix="end"),
    # prompts
    Case(
        "completion without prompt", "POST", TEXT, {}, 400, "missing_required_parameter", "prompt"
    ),
    text("prompt null", "invalid_type", "prompt", prompt=None),
    text("prompt a number", "invalid_type", "prompt", prompt=5),
    text("prompt empty", "invalid_value", "prompt", prompt=""),
    text("no prompt in the list", "invalid_value", "prompt", prompt=[]),
    text("token ids too large", "invalid_value", "prompt", prompt=[10**7]),
    text("token ids of 71 bits", "invalid_value", "prompt", prompt=[2**70]),
    text("token ids negative", "invalid_value", "prompt", prompt=[-1]),
    text("token ids and text", "invalid_type", "prompt.1", prompt=[1, "a"]),
    text(
        "texts and parts", "invalid_type", "prompt.1", prompt=["a", {"type": "text", "text": "b"}]
    ),
    text("token ids of fractions", "invalid_type", "prompt.0", prompt=[0.5]),
    text("over the window", "context_length_exceeded", "prompt", prompt=[5] * CONTEXT_WINDOW),
    text("many ids over the window", "context_length_exceeded", "prompt", prompt=[5] * 100_000),
    text(
        "a second prompt over the window", "context_length_exceeded", "prompt.1", prompt=["a", LONG]
    ),
    text("a second prompt empty", "invalid_value", "prompt.1", prompt=["a", ""]),
    text("a second prompt of wrong ids", "invalid_value", "prompt.1", prompt=[[1], [10**7]]),
    text("129 choices", "invalid_value", "n", prompt=["a", "b", "c"], n=43),
    text("logprobs 21", "invalid_value", "logprobs", logprobs=21),
    text(
        "unknown id",
        "context_cache_not_found",
        "prompt.0.id",
        status=404,
        prompt=[{"type": "context_cache", "id": UNKNOWN_ID}],
    ),
    text("lone surrogate", "invalid_value", "prompt", prompt="\ud800"),
    text("lone surrogate in a list", "invalid_value", "prompt.1", prompt=["a", "\ud800"]),
    # context caches
    Case("caches of nothing", "POST", CACHES, {}, 400, "invalid_value", "chunks"),
    caches("no chunk", "invalid_value", "chunks", chunks=[]),
    caches("an empty chunk", "invalid_value", "chunks.1", chunks=["a", ""]),
    caches("chunks of text", "invalid_type", "chunks", chunks="a"),
    caches("a chunk a number", "invalid_type", "chunks.0", chunks=[1]),
    caches("10,001 chunks", "invalid_value", "chunks", chunks=["a"] * 10_001),
    caches("a lone surrogate", "invalid_value", "chunks.0", chunks=["\ud83d"]),
    caches("a chunk over the window", "context_length_exceeded", "chunks.1", chunks=["a", LONG]),
    caches(
        "pieces over the window",
        "context_length_exceeded",
        "split.max_tokens",
        input=LONG,
        split={"max_tokens": 9999},
    ),
    caches(
        "an input too long to split",
        "invalid_value",
        "input",
        input="a" * (MAX_INPUT_CHARACTERS + 1),
    ),
    caches(
        "an input of too many pieces",
        "invalid_value",
        "input",
        input="a " * 10_001,
        split={"max_tokens": 1},
    ),
    caches("chunks and input", "invalid_value", "chunks", chunks=["a"], input="b"),
    caches("split without input", "invalid_value", "split", split={"method": "fixed"}),
    caches("empty input", "invalid_value", "input", input=""),
    caches("blank input", "invalid_value", "input", input=" \n "),
    caches(
        "unknown split", "invalid_value", "split.method", input="a", split={"method": "chapter"}
    ),
    caches(
        "split max_tokens 0",
        "invalid_value",
        "split.max_tokens",
        input="a",
        split={"max_tokens": 0},
    ),
    caches(
        "split max_tokens huge",
        "invalid_value",
        "split.max_tokens",
        input="a",
        split={"max_tokens": 10**9},
    ),
    caches("ttl -1", "invalid_value", "ttl", ttl=-1),
    caches("ttl 0", "invalid_value", "ttl", ttl=0),
    caches("ttl NaN", "invalid_value", "ttl", ttl=float("nan")),
    caches("ttl a word", "invalid_value", "ttl", ttl="soon"),
    caches("ttl of minutes", "invalid_value", "ttl", ttl="10m"),
    caches("ttl -5s", "invalid_value", "ttl", ttl="-5s"),
    caches("ttl 0.0s", "invalid_value", "ttl", ttl="0.0s"),
    caches("ttl beyond a century", "invalid_value", "ttl", ttl="3153600001s"),
    caches("ttl a list", "invalid_type", "ttl", ttl=[1]),
    caches("ttl and expires_at", "invalid_value", "expires_at", ttl=5, expires_at=4_000_000_000),
    caches("expires_at past", "invalid_value", "expires_at", expires_at=1_600_000_000),
    caches("expires_at beyond all years", "invalid_value", "expires_at", expires_at=1e15),
    caches(
        "17 pairs of metadata",
        "invalid_value",
        "metadata",
        metadata={str(i): "v" for i in range(17)},
    ),
    caches(
        "metadata key too long", "invalid_value", "metadata." + "k" * 65, metadata={"k" * 65: "v"}
    ),
    caches("metadata value too long", "invalid_value", "metadata.k", metadata={"k": "v" * 513}),
    caches("metadata value a number", "invalid_type", "metadata.k", metadata={"k": 1}),
    caches("metadata of a lone surrogate", "invalid_value", "metadata.k", metadata={"k": "\ud800"}),
    caches(
        "metadata key of a surrogate",
        "invalid_value",
        "metadata.\ufffd\ufffd\ufffd",
        metadata={"\ud800": "v"},
    ),
    caches("name empty", "invalid_value", "name", name=""),
    caches("name too long", "invalid_value", "name", name="n" * 257),
    caches("unknown context", "invalid_value", "context", context="between"),
    caches("misspelt", "unknown_parameter", "tll", tll=5),
    change("ttl -1", "invalid_value", "ttl", ttl=-1),
    change("chunks", "unknown_parameter", "chunks", chunks=["b"]),
    change("metadata of text", "invalid_type", "metadata", metadata="m"),
    route(
        "change unknown id", "PATCH", f"{CACHES}/{UNKNOWN_ID}", 400, "missing_required_parameter"
    ),
    route("read unknown id", "GET", f"{CACHES}/{UNKNOWN_ID}", 404, "context_cache_not_found", "id"),
    route(
        "delete unknown id",
        "DELETE",
        f"{CACHES}/{UNKNOWN_ID}",
        404,
        "context_cache_not_found",
        "id",
    ),
    route("list limit 0", "GET", f"{CACHES}?limit=0", 400, "invalid_value", "limit"),
    route("list limit 101", "GET", f"{CACHES}?limit=101", 400, "invalid_value", "limit"),
    route("list limit a word", "GET", f"{CACHES}?limit=all", 400, "invalid_value", "limit"),
    route("list order", "GET", f"{CACHES}?order=random", 400, "invalid_value", "order"),
    route("list cursor", "GET", f"{CACHES}?after={UNKNOWN_ID}", 400, "invalid_value", "after"),
    # tokenize
    Case("tokenize nothing", "POST", TOKENS, {}, 400, "invalid_value", "text"),
    Case(
        "tokenize two", "POST", TOKENS, {"text": "a", "prompt": "b"}, 400, "invalid_value", "prompt"
    ),
    Case(
        "tokenize a chat with special tokens",
        "POST",
        TOKENS,
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
        400,
        "invalid_value",
        "add_special_tokens",
    ),
    Case(
        "tokenize several prompts",
        "POST",
        TOKENS,
        {"prompt": ["a", "b"]},
        400,
        "invalid_value",
        "prompt",
    ),
    Case(
        "tokenize too many ids",
        "POST",
        TOKENS,
        {"prompt": [5] * 9999},
        400,
        "context_length_exceeded",
        "prompt",
    ),
    Case(
        "tokenize a lone surrogate",
        "POST",
        TOKENS,
        {"text": "\ud800"},
        400,
        "invalid_value",
        "text",
    ),
    # routes
    route(
        "a name of bytes that are no UTF-8",
        "GET",
        f"{CACHES}/%ff%ed%a0%80",
        404,
        "context_cache_not_found",
        "id",
    ),
    route(
        "a cursor of bytes that are no UTF-8",
        "GET",
        f"{CACHES}?after=%ed%a0%80",
        400,
        "invalid_value",
        "after",
    ),
    route("an unknown route of such bytes", "GET", "/%ed%a0%80", 404, "not_found"),
    route("unknown route", "GET", "/v1/assistants", 404, "not_found"),
    route("unknown route, POST", "POST", "/v1/images/generations", 404, "not_found"),
    route("wrong method", "GET", CHAT, 405, "method_not_allowed"),
    route("wrong method on a cache", "PUT", f"{CACHES}/{UNKNOWN_ID}", 405, "method_not_allowed"),
    route("unknown model", "GET", "/v1/models/gpt-4", 404, "model_not_found", "model"),
]


def test_mistake_is_answered(served: Served, subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case.name):
            content = (
                case.body if isinstance(case.body, bytes | None) else json.dumps(case.body).encode()
            )
            answer = served.http.request(
                case.method, case.path, content=content, headers=dict(case.headers)
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                case.status,
                case.code,
                case.param,
            ), error
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            assert "Traceback" not in answer.text


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 45


def test_server_is_healthy_after_all_mistakes(served: Served) -> None:
    """Runs behind the table, in the same file and on the same server."""
    assert served.get("/health").json() == {"status": "ok"}
    answer = served.post(
        CHAT, {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 2, "ignore_eos": True}
    )
    assert answer.json()["usage"]["completion_tokens"] == 2
    served.wait_until_idle()


def test_expired_and_deleted_ids_are_unknown(served: Served) -> None:
    expired = served.cache("will expire")[0]
    deleted = served.cache("will be deleted")[0]
    assert served.http.delete(f"{CACHES}/{deleted}").json() == {
        "id": deleted,
        "object": "context_cache",
        "deleted": True,
    }
    served.expire(expired)
    for cache_id in (expired, deleted):
        answers = [
            served.get(f"{CACHES}/{cache_id}"),
            served.http.delete(f"{CACHES}/{cache_id}"),
            served.http.patch(f"{CACHES}/{cache_id}", json={"name": "n"}),
            served.post(
                CHAT,
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "context_cache", "id": cache_id}]}
                    ]
                },
            ),
            served.post(TEXT, {"prompt": [{"type": "context_cache", "id": cache_id}]}),
        ]
        assert [answer.status_code for answer in answers] == [404] * 5
        messages = {answer.json()["error"]["message"] for answer in answers}
        assert messages == {served.get(f"{CACHES}/{cache_id}").json()["error"]["message"]}
        assert {answer.json()["error"]["code"] for answer in answers} == {"context_cache_not_found"}


def test_harmless_fields_of_openai_are_ignored(served: Served) -> None:
    harmless = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "logprobs": None,
        "stop": None,
        "max_tokens": None,
        "use_beam_search": False,
        "top_logprobs": 0,
        "verbosity": "medium",
        "an_unknown_one": None,
    }
    answer = served.post(CHAT, {"messages": HELLO, "max_completion_tokens": 1, **harmless})
    assert answer.status_code == 200, answer.text
    answer = served.post(
        TEXT, {"prompt": "a", "max_tokens": 1, "best_of": 1, "echo": False, "suffix": None}
    )
    assert answer.status_code == 200, answer.text


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}


@pytest.mark.parametrize("stream", [False, True])
def test_names_of_all_roles_mean_nothing_to_a_template_without_them(
    served: Served, stream: bool
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "tool_calls": [CALL]},
        {"role": "tool", "content": "nothing", "tool_call_id": "c1"},
    ]
    told = []
    for named in (messages, [message | {"name": "ann"} for message in messages]):
        body = {"messages": named, "max_tokens": 3, "temperature": 0, "stream": stream}
        answer = served.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        told.append(served.post("/tokenize", {"messages": named}).json()["tokens"])
    assert told[0] == told[1]


def test_messages_as_clients_dump_them_are_accepted(served: Served) -> None:
    dumped = openai.types.chat.ChatCompletionMessage(role="assistant", content="Hello").model_dump()
    assert dumped["annotations"] is None
    empty = dumped | {"content": None, "annotations": [], "refusal": ""}
    parts = [
        {
            "type": "input_text",
            "text": "Hi",
            "annotations": [],
            "cache_control": {"type": "ephemeral"},
            "citations": None,
        },
        {"type": "output_text", "text": "Ho", "index": 0, "logprobs": None},
    ]
    messages = [*HELLO, dumped, *HELLO, empty, {"role": "user", "content": parts, "weight": None}]
    answer = served.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_same_cache_twice_in_one_prompt_is_fine(served: Served) -> None:
    (cache_id,) = served.cache("a cat and a dog")
    part = {"type": "context_cache", "id": cache_id}
    content = [part, {"type": "text", "text": "and"}, part]
    answer = served.post(
        CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"[" * 8000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_what_python_reads_as_no_json_is_told(served: Served, content: bytes, cause: str) -> None:
    headers = {"Content-Type": "application/json"}
    for padding in (b"", b" " * 20_000):  # long bodies are read elsewhere
        answer = served.http.post(CHAT, content=content + padding, headers=headers)
        assert cause in answer.json()["error"]["message"]


def test_max_tokens_are_cut_to_the_room_in_the_window(
    served: Served, subtests: pytest.Subtests
) -> None:
    """Clients ask for as much as their own settings say, whatever the window is."""
    said = [{"role": "user", "content": "Hi"}]
    over = CONTEXT_WINDOW + 1
    for path, body in {
        "/v1/chat/completions": {"messages": said, "max_tokens": over},
        "/chat/completions": {"messages": said, "max_completion_tokens": over},
        "/v1/completions": {"prompt": ["Hi", "Hello there"], "max_tokens": over},
        "/v1/responses": {"input": "Hi", "max_output_tokens": over},
    }.items():
        with (
            subtests.test(path),
            # it ends here: the rest of the window is not waited for
            served.http.stream("POST", path, json=body | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200
            assert next(answer.iter_lines())
