"""What the OpenAPI document says is what the server does. Answers of all other tests are checked
against it, too (see ``openapi_contract``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator, ValidationError

from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.openapi_contract import Contract
from tests.doors.http.serving import Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
CACHES = "/v1/context_caches"
HELLO = [{"role": "user", "content": "Hello"}]
UNHEALTHY = {("/health", "503"), ("/ping", "503")}
METHODS = {"get", "post", "patch", "delete"}


@pytest.fixture(scope="module")
def document(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = served.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def keyed_document(keyed: Served) -> dict[str, Any]:
    """Of a server with keys."""
    found: dict[str, Any] = keyed.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(part, list):
        for entry in part:
            yield from references(entry)


def test_the_document_is_whole(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    unused = schemas.keys() - {reference.rpartition("/")[2] for reference in references(document)}
    assert unused == set(), "nothing is described that no route has"
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(operation.get("summary") for _, _, operation in operations(document))


def test_errors_are_the_servers_own(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        body = "MessagesError" if path.startswith(MESSAGES) else "ErrorBody"
        error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
        assert method in METHODS
        answers = operation["responses"]
        assert "422" not in answers, "which the server never answers"
        assert "500" in answers
        assert {"400", "421"} <= answers.keys()
        of_bodies = {"408", "413", "415"}
        assert answers.keys() & of_bodies == (of_bodies if "requestBody" in operation else set())
        assert "401" not in answers, "there are no keys"
        for status, answer in answers.items():
            if status.startswith(("4", "5")) and (path, status) not in (
                ("/health", "503"),
                ("/ping", "503"),
            ):
                assert answer["content"] == error
                assert answer["description"]
    for path in (CHAT, TEXT, MESSAGES, RESPONSES, "/v1/link/explain"):
        answers = document["paths"][path]["post"]["responses"]
        others = {"200", "400", "404", "421", "429", "500", "503"}
        assert answers.keys() == others | {"408", "413", "415"}
        assert "Retry-After" in answers["429"]["headers"]
    assert set(document["paths"][CACHES]["post"]["responses"]) >= {"400", "403", "404", "503"}


def test_every_answer_has_a_schema(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        answers = [each for status, each in operation["responses"].items() if status[0] == "2"]
        assert len(answers) == 1, path
        for kind, content in answers[0]["content"].items():
            if kind == "application/json":
                schema = content["schema"]
                forms = schema.get("anyOf", [schema])
                assert all("$ref" in form for form in forms), f"{path} does not say what it answers"


def test_keys_are_told_where_they_are_needed(
    document: dict[str, Any], keyed_document: dict[str, Any]
) -> None:
    assert "securitySchemes" not in document["components"]
    assert keyed_document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    free = set()
    for path, _, operation in operations(keyed_document):
        if "security" in operation:
            assert operation["security"] == [{"key": []}, {"x-api-key": []}]
            assert "401" in operation["responses"]
        else:
            assert "401" not in operation["responses"]
            free.add(path)
    assert free == {"/", "/docs", "/health", "/live", "/ping"}


CALLING_ONE: dict[str, Any] = {
    "tools": [{"name": "f", "input_schema": {"type": "object", "additionalProperties": False}}],
    "tool_choice": {"type": "tool", "name": "f"},
}


@pytest.mark.parametrize(
    ("path", "schema", "fields"),
    [
        (CHAT, "ChatCompletionChunk", {"messages": HELLO}),
        (
            CHAT,
            "ChatCompletionChunk",
            {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2},
        ),
        (
            CHAT,
            "ChatCompletionChunk",
            {"messages": HELLO, "stream_options": {"include_usage": True}},
        ),
        (TEXT, "CompletionChunk", {"prompt": "a"}),
        (
            TEXT,
            "CompletionChunk",
            {"prompt": ["a", "b"], "logprobs": 2, "stream_options": {"include_usage": True}},
        ),
    ],
)
def test_streams_have_the_chunks_that_are_described(
    served: Served, document: dict[str, Any], path: str, schema: str, fields: dict[str, Any]
) -> None:
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"][
        "schema"
    ]
    assert described == {"$ref": f"#/components/schemas/{schema}"}
    answer = served.post(
        path, {"stream": True, "max_tokens": 12, "seed": 0, "ignore_eos": True, **fields}
    )
    *chunks, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert len(chunks) > 3
    for chunk in chunks:
        Contract(document).validate(json.loads(chunk), described)


@pytest.mark.parametrize(
    ("path", "schema", "fields"),
    [
        (MESSAGES, "MessageStreamEvent", {"messages": HELLO, "max_tokens": 4}),
        (MESSAGES, "MessageStreamEvent", {"messages": HELLO, "max_tokens": 60, **CALLING_ONE}),
        (RESPONSES, "ResponseStreamEvent", {"input": "Hello", "max_output_tokens": 4}),
    ],
)
def test_named_events_are_those_that_are_described(
    served: Served, document: dict[str, Any], path: str, schema: str, fields: dict[str, Any]
) -> None:
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"][
        "schema"
    ]
    assert described == {"$ref": f"#/components/schemas/{schema}"}
    events = served.post(path, {"stream": True, "temperature": 0, **fields}).text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        Contract(document).validate(body, described)


def test_a_stream_that_fails_ends_with_the_error_body(
    faked: Served, engine: FakeEngine, document: dict[str, Any]
) -> None:
    engine.fails_at = 1
    answer = faked.post(CHAT, {"messages": HELLO, "stream": True})
    *_, error, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    Contract(document).validate(json.loads(error), {"$ref": "#/components/schemas/ErrorBody"})


def test_a_failed_engine_is_told_as_described(faked: Served, engine: FakeEngine) -> None:
    engine.healthy = False
    assert faked.get("/health").status_code == 503
    engine.close()
    answer = faked.post(CHAT, {"messages": HELLO})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")


PARTS = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "strict": None},
}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"input": "a", "max_output_tokens": 1, "include": ["everything"]}),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "service_tier": "bogus"}),
    (
        CHAT,
        {"messages": HELLO, "user": "me", "metadata": {"a": "b"}, "tools": [], "logit_bias": {}},
    ),
    (
        CHAT,
        {
            "messages": HELLO,
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "audio": None,
        },
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": PARTS, "tool_calls": [], "tool_call_id": None}
            ]
        },
    ),
    (
        CHAT,
        {
            "messages": HELLO,
            "stop": ["a", "b"],
            "link": {"policy": "full"},
            "seed": None,
            "top_k": -1,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "assistant", "content": None, "annotations": None}],
            "logit_bias": {"5": 1.5},
        },
    ),
    (
        CHAT,
        {
            "messages": HELLO,
            "something": None,
            "service_tier": "auto",
            "bad_words": ["a"],
            "stop_token_ids": [5],
        },
    ),
    (
        CHAT,
        {"messages": HELLO, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    ),
    (
        CHAT,
        {
            "messages": HELLO,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (
        CHAT,
        {
            "messages": [
                *HELLO,
                CALLING,
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "x"},
            ]
        },
    ),
    (
        CHAT,
        {
            "messages": HELLO,
            "prompt_logprobs": 1,
            "chat_template_kwargs": {},
            "add_generation_prompt": False,
        },
    ),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object", "schema": {}}}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "reasoning": "b", "mood": "c"}]}),
    (TEXT, {"prompt": "a", "guided_regex": "a", "include_stop_str_in_output": True}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 1, "echo": False, "top_logprobs": 0}),
    ("/tokenize", {"text": "a", "add_special_tokens": True, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5]}),
    (
        CHAT,
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        },
    ),
    (TEXT, {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}}),
    (TEXT, {"prompt": "a", "structured_outputs": {"json": {"type": "integer"}, "regex": None}}),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 0}),
    (TEXT, {"prompt": PARTS, "best_of": 1, "echo": False, "suffix": ""}),
    (TEXT, {"prompt": [5, 6]}),
    (TEXT, {"prompt": [[5, 6], [7]]}),
    (TEXT, {"prompt": ["a", "b"], "stop": "x"}),
    (
        CACHES,
        {"chunks": ["a"], "ttl": "600s", "metadata": {"a": "b"}, "name": "n", "context": "alone"},
    ),
    (CACHES, {"chunks": ["a"], "ttl": 60, "scope": "shared"}),
    (CACHES, {"input": "a b c", "split": {"method": "sentence", "max_tokens": 5}, "ttl": None}),
    (CACHES, {"chunks": ["a"], "input": None, "ttl": "0.5s"}),
    ("/tokenize", {"messages": HELLO, "text": None}),
    ("/v1/link/explain", {"prompt": "a"}),
    (
        MESSAGES,
        {
            "messages": HELLO,
            "max_tokens": 1,
            "system": PARTS,
            "metadata": {"user_id": "me"},
            "top_k": 5,
        },
    ),
    (
        MESSAGES,
        {"messages": HELLO, "max_tokens": 1, "thinking": {"type": "disabled"}, "container": None},
    ),
    (
        RESPONSES,
        {
            "input": "a",
            "max_output_tokens": 1,
            "store": False,
            "include": [],
            "truncation": "disabled",
        },
    ),
    (
        RESPONSES,
        {"input": HELLO, "max_output_tokens": 1, "text": {"format": {"type": "text"}}, "tools": []},
    ),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"input": "a", "max_output_tokens": 1, "top_logprobs": False}),
    (RESPONSES, {"input": "a", "include": [5]}),
    (CHAT, {"messages": HELLO, "allowed_token_ids": []}),
    ("/detokenize", {"tokens": "a"}),
    (CHAT, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "two words"}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "context_cache"}]}]}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": ""}]}),
    (CHAT, {"messages": HELLO, "tool_choice": "perhaps"}),
    (CHAT, {"messages": HELLO, "temperature": 3}),
    (CHAT, {"messages": HELLO, "service_tier": 5}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}),
    (CHAT, {"messages": HELLO, "structured_outputs": {"json": 5}}),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}),
    (TEXT, {"prompt": {"type": "text", "text": "a"}}),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}),
    (CACHES, {"chunks": [""]}),
    (CACHES, {"chunks": ["a"], "ttl": 0}),
    (CACHES, {"input": "a", "split": {"method": "chapter"}}),
    (CACHES, {"chunks": ["a"], "metadata": {str(number): "v" for number in range(17)}}),
    ("/tokenize", {"text": 5}),
    (MESSAGES, {"messages": HELLO}),
    (RESPONSES, {"input": "a", "previous_response_id": ""}),
]


def test_bodies_that_are_described_are_accepted(
    served: Served, document: dict[str, Any], subtests: pytest.Subtests
) -> None:
    contract = Contract(document)
    for path, body in ACCEPTED:
        with subtests.test(path, body=body):
            contract.validate(body, contract.body_schema(document["paths"][path]["post"]))
            limit = {"max_tokens": 1} if path in (CHAT, TEXT) else {}
            answer = served.post(path, body | limit)
            assert answer.status_code == 200, answer.text


def test_bodies_that_are_refused_are_not_described(
    served: Served, document: dict[str, Any], subtests: pytest.Subtests
) -> None:
    contract = Contract(document)
    for path, body in REFUSED:
        with subtests.test(path, body=body):
            assert served.post(path, body).status_code == 400
            with pytest.raises(ValidationError):
                contract.validate(body, contract.body_schema(document["paths"][path]["post"]))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"status": "fine"}),
        (200, {"status": "ok", "more": 1}),
        (418, {"status": "ok"}),
        (500, {"error": {"message": "m"}}),
    ],
)
def test_answers_that_are_not_described_are_noticed(
    document: dict[str, Any], status: int, body: dict[str, Any]
) -> None:
    answer = httpx.Response(
        status, json=body, request=httpx.Request("GET", "http://localhost/health")
    )
    with pytest.raises((AssertionError, ValidationError)):
        Contract(document).check(answer)


def test_parameters_of_listings_are_those_that_are_taken(
    served: Served, document: dict[str, Any]
) -> None:
    def schema_of(method: str, name: str) -> dict[str, Any]:
        parameters = document["paths"][CACHES][method]["parameters"]
        found: dict[str, Any] = next(
            parameter for parameter in parameters if parameter["name"] == name
        )
        return found

    after = Draft202012Validator(schema_of("get", "after")["schema"])
    assert not after.is_valid("")
    assert served.get(CACHES, params={"after": ""}).status_code == 400
    metadata = schema_of("delete", "metadata")
    assert metadata["required"]
    assert not Draft202012Validator(metadata["schema"]).is_valid({})
    assert served.http.delete(CACHES).status_code == 400
    assert not schema_of("get", "metadata")["required"]


@pytest.mark.parametrize("path", ["search", "split", "usage"])
def test_names_of_routes_are_no_ids(served: Served, path: str) -> None:
    assert served.http.delete(f"{CACHES}/{path}").status_code == 405
    assert served.http.delete(f"{CACHES}/{path}d").status_code == 404
