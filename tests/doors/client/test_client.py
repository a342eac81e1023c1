"""The clients do over HTTP what ``LLM`` does in the process, errors included."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from inspect import signature
from itertools import product
from typing import Any

import httpx
import pytest

from kvlinker import AsyncClient, Client
from kvlinker.base.errors import (
    AuthenticationError,
    ContextCacheNotFoundError,
    ContextLengthError,
    InvalidRequestError,
    KVLinkerError,
    OverloadedError,
    PolicyError,
)
from kvlinker.base.types.texts import SearchHit
from kvlinker.base.types.tools import ToolCall
from kvlinker.doors.client import RemoteContextCache, ServerUnreachableError, calls
from tests.doors.http.serving import MODEL_NAME, Served

CHUNKS = ("The cat sat on the mat. It was fine!", "numbers 1 2 3 and more words")
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as made:
        yield made


def question(caches: Any) -> Any:
    return [
        {
            "role": "user",
            "content": ["Look: ", caches[1], caches[0], "What do the two have in common?"],
        }
    ]


def test_context_caches_are_what_was_asked_for(client: Client) -> None:
    caches = client.generate_context_cache(
        CHUNKS, ttl=100, name="pair", metadata={"a": "b"}, context="alone"
    )
    assert [type(cache) for cache in caches] == [RemoteContextCache] * 2
    assert caches[0].tokens != caches[1].tokens
    for cache in caches:
        assert (cache.model, cache.name, cache.metadata, cache.tier) == (
            MODEL_NAME,
            "pair",
            {"a": "b"},
            "host",
        )
        assert cache.bytes > 0
        assert cache.expires_at is not None
        assert abs(cache.expires_at - time.time() - 100) < 5


def test_a_string_is_one_chunk(client: Client) -> None:
    text = "The cat sat on the mat."
    (alone,), (listed,) = client.generate_context_cache(text), client.generate_context_cache([text])
    assert alone.tokens == listed.tokens > 1


def test_context_caches_tell_whether_a_prompt_brought_them(client: Client) -> None:
    marked = {
        "type": "text",
        "text": "A marked text of its own.",
        "cache_control": {"type": "ephemeral"},
    }
    client.chat_completion([{"role": "user", "content": [marked, "What?"]}], **GREEDY)
    (named,) = client.generate_context_cache(["A named text of its own."])
    listed = client.list_caches(limit=2).items
    assert [(cache.id == named.id, cache.implicit) for cache in listed] == [
        (True, False),
        (False, True),
    ]


def test_fields_of_newer_servers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    hit = {"id": "cc_1", "score": 1.0, "text": "a", "tokens": 1, "metadata": {}, "of": "tomorrow"}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": [hit]}, request=request)

    with Client("http://server") as client:
        monkeypatch.setattr(
            client,
            "_http",
            httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)),
        )
        assert client.search("a") == (SearchHit("cc_1", 1.0, "a", 1, {}),)


def test_explanation_is_that_of_llm(served: Served, client: Client) -> None:
    remote = client.explain(question(client.generate_context_cache(CHUNKS)), policy="query-10")
    local = served.llm.explain(
        question(served.llm.generate_context_cache(CHUNKS)), policy="query-10"
    ).to_json()
    for part in ("layers", "scores", "cost", "policy", "tokens"):
        assert remote[part] == local[part]


def test_answer_is_that_of_llm(served: Served, client: Client) -> None:
    remote = client.chat_completion(
        question(client.generate_context_cache(CHUNKS)), policy="legolink-2", **GREEDY
    )
    local = served.llm.chat_completion(
        question(served.llm.generate_context_cache(CHUNKS)), policy="legolink-2", **GREEDY
    )
    assert remote.text == local.text
    assert remote.usage == local.usage
    assert remote.usage.recomputed_tokens == 4
    assert remote.finish_reason == local.finish_reason == "length"
    assert 0 < remote.timing.link < 30
    assert remote.timing.decode > 0


def test_text_is_split_by_the_server(served: Served, client: Client) -> None:
    text = "\n\n".join(f"Paragraph {number} about a dog." for number in range(4))
    caches = client.cache_text(text, method="paragraph", max_tokens=64, name="text")
    assert [cache.tokens for cache in caches] == [
        len(served.llm.builder.encoder.encode_data(piece))
        for piece in served.llm.split(text, method="paragraph")
    ]
    assert len(caches) == 4
    assert {cache.name for cache in caches} == {"text"}


def test_stream(client: Client) -> None:
    pieces = list(client.stream_chat_completion(HELLO, **GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == client.chat_completion(HELLO, **GREEDY).text
    assert list(client.chat_completion(HELLO, stream=True, **GREEDY)) == pieces


def test_calls_and_reasoning_are_told() -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Where?",
        "tool_calls": [call],
    }
    details = {"cached_tokens": 0, "exact_cached_tokens": 0, "recomputed_tokens": 0}
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": details}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    answer = answering(200, json.dumps(body).encode()).chat_completion(HELLO)
    assert (answer.text, answer.reasoning) == ("", "Where?")
    assert answer.tool_calls == (ToolCall("call-1", "find", "{}"),)


def test_closed_stream_cancels_the_request(served: Served, client: Client) -> None:
    stream = client.stream_chat_completion(HELLO, max_tokens=1500, ignore_eos=True)
    next(stream)
    assert served.llm.current_load().running == 1
    stream.close()  # type: ignore[attr-defined]
    served.wait_until_idle()


def test_expired_cache_is_gone(client: Client) -> None:
    (cache,) = client.generate_context_cache(["a"])
    client.expire_cache(cache)
    for attempt in (
        lambda: client.expire_cache(cache.id),
        lambda: client.chat_completion([{"role": "user", "content": ["Look: ", cache]}]),
        lambda: next(client.stream_chat_completion([{"role": "user", "content": [cache]}])),
    ):
        with pytest.raises(ContextCacheNotFoundError) as caught:
            attempt()
        assert caught.value.cache_id == cache.id
        assert cache.id in caught.value.message


async def test_async_client(served: Served) -> None:
    async with AsyncClient(f"{served.url}/v1/") as client:
        caches = await client.generate_context_cache(CHUNKS)
        answer = await client.chat_completion(question(caches), policy="naive", **GREEDY)
        streamed = [
            piece
            async for piece in client.stream_chat_completion(
                question(caches), policy="naive", **GREEDY
            )
        ]
        assert "".join(streamed) == answer.text
        again = await client.chat_completion(
            question(caches), policy="naive", stream=True, **GREEDY
        )
        assert [piece async for piece in again] == streamed
        (piece,) = await client.cache_text("One dog.")
        await client.expire_cache(piece)
        with pytest.raises(ContextCacheNotFoundError):
            await client.expire_cache(piece.id)
        with pytest.raises(PolicyError):
            await client.chat_completion(HELLO, policy="nope")
        with pytest.raises(PolicyError):
            await anext(client.stream_chat_completion(HELLO, policy="nope"))
    local = served.llm.chat_completion(
        question(served.llm.generate_context_cache(CHUNKS)), policy="naive", **GREEDY
    )
    assert answer.text == local.text


MISTAKES: list[tuple[dict[str, Any], type[KVLinkerError], str, str | None]] = [
    ({"temperature": -1}, InvalidRequestError, "invalid_value", "temperature"),
    ({"policy": "legolink-0"}, PolicyError, "invalid_policy", "link.policy"),
    ({"temperature": float("nan")}, InvalidRequestError, "invalid_value", None),
    ({"stop": ["\ud800"]}, InvalidRequestError, "invalid_value", None),
    ({"stop": [object()]}, InvalidRequestError, "invalid_value", None),
    (
        {"policy": "naive", "link": {"policy": "full"}},
        InvalidRequestError,
        "invalid_value",
        "link.policy",
    ),
    (
        {"policy": "naive", "link": {"keep": "some"}},
        InvalidRequestError,
        "invalid_value",
        "link.keep",
    ),
]


def test_a_misspelt_argument_is_told(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    assert client.chat_completion(HELLO, max_tokens=1, temprature=1).usage.output_tokens == 1
    assert "does not know temprature" in caplog.text


def test_mistakes(client: Client, subtests: pytest.Subtests) -> None:
    for fields, error, code, param in MISTAKES:
        with subtests.test(str(fields)):
            with pytest.raises(error) as caught:
                client.chat_completion(HELLO, **fields)
            assert type(caught.value) is error
            assert (caught.value.code, caught.value.param) == (code, param)
            assert 400 <= caught.value.status < 500
    with pytest.raises(ContextLengthError):
        client.chat_completion([{"role": "user", "content": "a" * 10**6}])


def test_keys(keyed: Served) -> None:
    with (
        Client(keyed.url, "key-alpha") as alpha,
        Client(keyed.url, "key-beta") as beta,
        Client(keyed.url) as nobody,
    ):
        (cache,) = alpha.generate_context_cache(["alpha's"])
        with pytest.raises(ContextCacheNotFoundError):
            beta.expire_cache(cache)
        with pytest.raises(AuthenticationError):
            nobody.expire_cache(cache)
        alpha.expire_cache(cache)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[bad"])
def test_no_server(url: str) -> None:
    with pytest.raises(ServerUnreachableError), Client(url) as client:
        client.chat_completion(HELLO)


def test_a_server_that_takes_too_long() -> None:
    def wait(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    client = Client("http://server")
    client._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(wait))
    with pytest.raises(ServerUnreachableError, match="has not answered in time"):
        client.generate_context_cache(CHUNKS)
    with pytest.raises(ServerUnreachableError, match="a longer timeout"):
        next(client.chat_completion(HELLO, stream=True))


CLIENTS: tuple[Any, ...] = (Client, AsyncClient)
NO_ADDRESSES: list[Any] = [
    "http://[::",
    "nonsense",
    "localhost:8000",
    "ftp://x",
    "http://",
    "",
    None,
]


def test_what_is_no_address(subtests: pytest.Subtests) -> None:
    for client, url in product(CLIENTS, NO_ADDRESSES):
        with subtests.test(f"{client.__name__} {url!r}"):
            with pytest.raises(InvalidRequestError, match="'http://localhost:8000'") as refused:
                client(url)
            assert repr(url) in str(refused.value)
            assert refused.value.param == "base_url"


NO_KEYS: list[Any] = ["ключ", "two\nlines", "two words", "", 5]


def test_what_is_no_key_is_refused_without_showing_it(subtests: pytest.Subtests) -> None:
    for client, key in product(CLIENTS, NO_KEYS):
        with subtests.test(f"{client.__name__} {key!r}"):
            with pytest.raises(InvalidRequestError, match="API key must be") as refused:
                client("http://localhost:8000", api_key=key)
            assert refused.value.param == "api_key"
            assert not key or str(key) not in str(refused.value)


def test_ids_that_no_server_gives_are_not_found(subtests: pytest.Subtests) -> None:
    for cache_id in ("", ".", "..", "../usage", "a/b", "a?b", "\ud800", "é"):
        with subtests.test(repr(cache_id)):
            client = Client("http://127.0.0.1:9")
            for call in (client.read_cache, client.expire_cache, client.update_cache):
                with pytest.raises(ContextCacheNotFoundError) as caught:
                    call(cache_id)
                assert caught.value.cache_id == cache_id
                assert repr(cache_id) in caught.value.message


def test_what_is_no_context_cache() -> None:
    client: Any = Client("http://127.0.0.1:9")
    with pytest.raises(InvalidRequestError, match="5 is no context cache"):
        client.expire_cache(5)
    with pytest.raises(InvalidRequestError, match="5 is no context cache"):
        client.chat_completion([{"role": "user", "content": ["Look: ", 5]}])


def test_what_is_no_text(client: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate_context_cache(5)
    assert caught.value.param == "chunks"
    with pytest.raises(InvalidRequestError) as caught:
        client.chat_completion([{"role": "user", "content": 5}])
    assert caught.value.param == "messages.0.content"


def test_a_policy_stands_beside_other_fields_of_link(client: Client) -> None:
    def sent(**fields: Any) -> Any:
        call = calls.chat_completion(HELLO, **fields)
        return json.loads(call.request()["content"]).get("link")

    assert sent(policy="naive", link={"order": "any"}) == {"order": "any", "policy": "naive"}
    assert sent(policy="naive", link={"policy": "naive"}) == {"policy": "naive"}
    assert sent(policy="naive", link=None) == {"policy": "naive"}
    assert sent(link={"order": "any"}) == {"order": "any"}
    assert sent() is None


def answering(status: int, content: bytes, **headers: str) -> Client:
    """A client whose server always gives this answer."""
    client = Client("http://server")
    transport = httpx.MockTransport(
        lambda _: httpx.Response(status, content=content, headers=headers)
    )
    client._http = httpx.Client(base_url="http://server", transport=transport)
    return client


def test_overload_tells_when_to_come_back() -> None:
    body = (
        b'{"error": {"message": "busy", "type": "overloaded_error", "param": null, "code":'
        b' "overloaded"}}'
    )
    with pytest.raises(OverloadedError) as caught:
        answering(429, body, **{"Retry-After": "7"}).chat_completion(HELLO)
    assert caught.value.retry_after == 7


@pytest.mark.parametrize(("status", "error"), [(502, KVLinkerError), (418, InvalidRequestError)])
def test_answers_of_strangers(status: int, error: type[KVLinkerError]) -> None:
    for body in (b"<html>Bad gateway</html>", b"[]", b'{"error": "text"}'):
        with pytest.raises(error) as caught:
            answering(status, body).chat_completion(HELLO)
        assert type(caught.value) is error
        assert (caught.value.status, str(status) in caught.value.message) == (status, True)


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>Log in</html>"), (200, b"[]"), (200, b'{"data": 5}'), (307, b"")],
    ids=["a page", "a list", "other fields", "a redirection"],
)
def test_answers_of_another_kind_of_server(status: int, body: bytes) -> None:
    client = answering(status, body, Location="https://elsewhere/")
    calls = (
        lambda: client.search("Oslo"),
        lambda: client.list_caches(),
        lambda: client.generate_context_cache(CHUNKS),
        lambda: client.split_text("a"),
        lambda: client.read_cache("cc_1"),
        lambda: client.chat_completion(HELLO),
        lambda: client.expire_caches({"a": "b"}),
        lambda: client.expire_cache("cc_1"),
        *([client.server_metrics] if status == 307 else []),
    )
    for call in calls:
        with pytest.raises(ServerUnreachableError, match="no server of kvlinker's"):
            call()


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_answer_cannot_hold_is_refused(client: Client, stream: bool) -> None:
    """Calls in a stream of text were left out, and the texts of several choices mixed."""
    ask: Any = client.chat_completion
    with pytest.raises(InvalidRequestError, match="n is 2") as refused:
        list(ask(HELLO, stream=stream, n=2, **GREEDY))
    assert refused.value.param == "n"
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    if stream:
        with pytest.raises(InvalidRequestError, match="no calls of 'tools'"):
            next(ask(HELLO, stream=True, tools=[tool], **GREEDY))
    assert ask(HELLO, stream=stream, tools=[tool], tool_choice="none", n=1, **GREEDY)


def test_failure_within_a_stream() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    error = (
        b'data: {"error": {"message": "broke", "type": "server_error", "param": null, '
        b'"code": "internal_error"}}\n\n'
    )
    content = chunk + error + b"data: [DONE]\n\n"
    stream = answering(
        200, content, **{"Content-Type": "text/event-stream"}
    ).stream_chat_completion(HELLO)
    assert next(stream) == "a"
    with pytest.raises(KVLinkerError, match="broke"):
        next(stream)


def test_an_answer_that_is_no_stream() -> None:
    with pytest.raises(ServerUnreachableError, match="text/event-stream"):
        next(
            answering(
                200, b"<html>Hello</html>", **{"Content-Type": "text/html"}
            ).stream_chat_completion(HELLO)
        )


def test_both_clients_have_the_same_calls() -> None:
    def shown(client: type) -> dict[str, Any]:
        methods = {name: entry for name, entry in vars(client).items() if name[0] != "_"}
        return {name: (str(signature(method)), method.__doc__) for name, method in methods.items()}

    sync, asynchronous = shown(Client), shown(AsyncClient)
    assert set(sync) == set(asynchronous)
    for name in set(sync) - {"chat_completion", "stream_chat_completion"}:
        assert sync[name] == asynchronous[name]
        assert sync[name][1]
    assert (
        sync["expire_caches"][0]
        == "(self, metadata: 'Mapping[str, str]', *, scope: 'str' = 'private') -> 'int'"
    )


def test_clients_need_no_torch() -> None:
    """Nor what serves: a client needs plain values, errors and httpx."""
    heavy = {
        "torch",
        "transformers",
        "fastapi",
        "kvlinker.llm",
        "kvlinker.doors.http",
        "kvlinker.store",
        "kvlinker.prompting.splitting",
    }
    imports = "import sys; from kvlinker import Client, AsyncClient, SamplingParams"
    code = f"{imports}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
