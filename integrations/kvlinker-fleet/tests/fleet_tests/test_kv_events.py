"""vLLM's events of blocks: what the router takes from them, and where requests go by it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doors.http.serving import listening, tiny_settings
from tests.waiting import PATIENCE, wait_until

from kvlinker_fleet.app import create_router
from kvlinker_fleet.backends import always
from kvlinker_fleet.naming import PromptOutline
from kvlinker_fleet.router import Router

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

from kvlinker_fleet.kv_events import (  # noqa: E402
    AllBlocksCleared,
    BlockChains,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvents,
    beginnings_of,
)

BLOCK = 4


def batch(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> bytes:
    payload: bytes = msgspec.msgpack.encode(EventBatch(1.5, list(events)))
    return payload


def stored(*tokens: int, begins: int = 0, **fields: Any) -> BlockStored:
    """The blocks of these tokens from the ``begins``-th on; a block's hash is all tokens up to its
    end."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    hashes: list[bytes | int] = [repr(tokens[:end]).encode() for end in ends]
    return BlockStored(
        hashes[begins:],
        hashes[begins - 1] if begins else None,
        list(tokens[begins * BLOCK :]),
        BLOCK,
        **fields,
    )


def names(*tokens: int, salt: str | None = None) -> list[str]:
    return [name for name, _ in beginnings_of(tokens, BLOCK, salt)]


def test_bytes_that_vllm_publishes_are_read() -> None:
    """Made by vLLM 0.32: two blocks, of which one is removed again."""
    payload = bytes.fromhex(
        "93cb3ff8000000000000928aa474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "92c402aaaac402bbbbb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398010203"
        "0405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f7261"
        "5f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f6964780084a474797065ac426c6f63"
        "6b52656d6f766564ac626c6f636b5f68617368657391c402bbbba66d656469756da3475055a967726f75"
        "705f6964780000"
    )
    changes = BlockChains().take(payload)
    first, second = names(*range(1, 9))
    assert changes == ([first], [second])


TOKENS = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=3 * BLOCK).map(
    lambda tokens: tuple(tokens[: len(tokens) // BLOCK * BLOCK])
)


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), TOKENS), max_size=20))
def test_who_follows_events_knows_what_is_there(steps: list[tuple[str, tuple[int, ...]]]) -> None:
    chains = BlockChains()
    known: set[str] = set()
    there: set[str] = set()
    for kind, tokens in steps:
        if kind == "store":
            event: BlockStored | BlockRemoved | AllBlocksCleared = stored(*tokens)
            there |= set(names(*tokens))
        elif kind == "remove":
            event = BlockRemoved(stored(*tokens).block_hashes[-1:])
            there -= set(names(*tokens)[-1:])
        else:
            event = AllBlocksCleared()
            there = set()
        changes = chains.take(batch(event))
        known = (known | set(changes.stored)) - set(changes.removed)
        assert known == there
    assert set(chains.clear().removed) == there


def test_other_media_groups_and_unknown_parents_name_nothing() -> None:
    chains = BlockChains()
    tokens = tuple(range(2 * BLOCK))
    for event in (
        stored(*tokens, medium="CPU"),
        stored(*tokens, group_idx=1),
        stored(*tokens, begins=1),
    ):
        assert chains.take(batch(event)) == ([], [])
    salted = stored(*tokens, extra_keys=[["pepper"], None])
    assert chains.take(batch(salted)).stored == names(*tokens, salt="pepper")
    assert not set(names(*tokens)) & set(names(*tokens, salt="pepper"))


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"token_ids": [1 << 63]}])
def test_numbers_that_blocks_cannot_have_are_no_events(wrong: dict[str, Any]) -> None:
    event = msgspec.structs.replace(stored(*range(BLOCK)), **wrong)
    with pytest.raises(msgspec.DecodeError):
        BlockChains().take(batch(event))


class PlainServer(ThreadingHTTPServer):
    """Answers as a plain vLLM server does, whose tokens are a text's characters."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [ord(character) for character in asked.get("prompt", "")]
        self._answer(200, {"tokens": tokens} if self.path == "/tokenize" else {"choices": []})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        written = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def plain_server() -> Iterator[PlainServer]:
    with PlainServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Publisher:
    """Publishes events as vLLM does."""

    def __init__(self, context: Any) -> None:
        self._socket = context.socket(zmq.XPUB)  # which hears of subscribers
        self._number = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def wait_for_subscriber(self) -> None:
        assert self._socket.poll(1000 * PATIENCE)
        self._socket.recv()

    def publish(self, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self._socket.send_multipart([b"", self._number.to_bytes(8), batch(*events)])
        self._number += 1

    def publish_nonsense(self) -> None:
        self._socket.send(b"a message of another kind")
        self._socket.send_multipart([b"", self._number.to_bytes(8), b"no batch"])
        self._number += 1

    def lose(self) -> None:
        self._number += 1


def test_requests_go_to_the_vllm_server_that_has_their_beginning(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        servers = [stack.enter_context(plain_server()) for _ in range(3)]
        publishers = [Publisher(context) for _ in servers]
        stack.callback(context.destroy, linger=0)
        urls = [server.url for server in servers]
        endpoints = {
            url: publisher.endpoint for url, publisher in zip(urls, publishers, strict=True)
        }
        app = create_router(always(urls), settings, api_key=None, kv_events=endpoints)
        url = stack.enter_context(listening(app, settings))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
        for publisher in publishers:
            publisher.wait_for_subscriber()

        def place(text: str) -> str:
            answer = client.post("/v1/completions", json={"model": "m", "prompt": text})
            assert answer.status_code == 200
            name: str = answer.headers["x-kvlinker-replica"]
            return name

        def always_at(number: int, text: str) -> bool:
            wanted = urlsplit(urls[number]).netloc
            return all(place(text + str(each)) == wanted for each in range(4))

        told = "Once upon a time. " * 50
        whole = told[: len(told) // BLOCK * BLOCK]
        publishers[2].publish_nonsense()
        publishers[2].publish(stored(*map(ord, whole)))
        wait_until(lambda: always_at(2, told))
        publishers[0].publish(stored(*map(ord, "Another tale, "[:12] * 50)))
        wait_until(lambda: always_at(0, "Another tale, "[:12] * 50))
        publishers[2].lose()
        publishers[2].publish(AllBlocksCleared())
        publishers[1].publish(stored(*map(ord, whole)))
        wait_until(lambda: always_at(1, told))


def test_a_server_that_hangs_is_not_asked_for_tokens() -> None:
    """No request waits for it."""
    asked: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(200, json={"tokens": list(range(8))})

    async def outline() -> PromptOutline:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            events = KVEvents(Router(), client, {f"http://{host}": "" for host in ("hung", "well")})
            for chains in events._chains.values():
                chains.block_size = BLOCK
            body = json.dumps({"prompt": "…"}).encode()
            return await events.outline(
                PromptOutline(), "/v1/completions", body, {}, ready={"http://well"}
            )

    assert len(asyncio.run(outline()).beginnings) == 2
    assert asked == ["well"]


class Sent:
    """A socket on which these payloads arrive, and the end after them."""

    def __init__(self, *payloads: bytes) -> None:
        self._messages = [[b"", n.to_bytes(8), payload] for n, payload in enumerate(payloads)]

    async def recv_multipart(self) -> list[bytes]:
        if not self._messages:
            raise EOFError
        return self._messages.pop(0)


def test_events_that_cannot_be_read_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known, added = batch(stored(*range(BLOCK), extra_keys=[["some"]])), []
    router, url = Router(), "http://one"
    monkeypatch.setattr(router, "note_beginnings", lambda _, new, __: added.extend(new))
    sent: Any = Sent(
        b"no batch",
        known.replace(b"some", b"\xff" * 4),
        known.replace(b"\xa4some", b"\x91" * 100_000 + b"\x00"),
        batch(stored(*range(BLOCK))),
    )

    async def follow() -> None:
        async with httpx.AsyncClient() as client:
            await KVEvents(router, client, {url: ""})._follow(sent, url)

    with pytest.raises(EOFError):
        asyncio.run(follow())
    assert added == names(*range(BLOCK))


@pytest.mark.parametrize(
    "body",
    [b"no JSON", b"[]", b'{"prompt": %s%s}' % (b"[" * 9999, b"]" * 9999)],
    ids=["no JSON", "no object", "deep"],
)
def test_the_replica_says_what_is_no_prompt(body: bytes) -> None:
    async def outline() -> PromptOutline:
        async with httpx.AsyncClient() as client:
            events = KVEvents(Router(), client, {"http://one": ""})
            events._chains["http://one"].block_size = BLOCK
            return await events.outline(
                PromptOutline(), "/v1/completions", body, {}, ready={"http://one"}
            )

    assert asyncio.run(outline()) == PromptOutline()
