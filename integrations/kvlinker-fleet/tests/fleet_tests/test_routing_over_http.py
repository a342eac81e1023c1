"""The router before real servers, and before servers that fail in every way."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.doors.http.serving import Served, listening, serving, tiny_model, tiny_settings
from tests.waiting import PATIENCE, wait_until

from kvlinker.base.events import RequestFinished
from kvlinker.base.types.limits import LEAST_PROMPT_BODY_BYTES
from kvlinker.doors.http.edge import access_log
from kvlinker.llm import LLM
from kvlinker.settings import Settings
from kvlinker_fleet.app import create_router
from kvlinker_fleet.backends import Find, always
from kvlinker_fleet.proxy import MOST_TRIES
from kvlinker_fleet.router import Router

TEXTS = [f"Document {n} says that the code of its door is {n * 7919}. " * 5 for n in range(6)]
CHAT = "/v1/chat/completions"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Served]]:
    """Two on one state directory."""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            settings = tiny_settings(tmp_path, policy="legolink-4")
            llm = LLM.from_model(tiny_model(), settings)
            made.append(stack.enter_context(serving(llm, settings)))
        yield made


@contextmanager
def routing(
    settings: Settings, *urls: str, api_key: str | None = None, **headers: str
) -> Iterator[httpx.Client]:
    with routing_to(always(urls), settings, api_key, **headers) as client:
        yield client


@contextmanager
def routing_to(
    find: Find, settings: Settings, api_key: str | None = None, **headers: str
) -> Iterator[httpx.Client]:
    app = create_router(find, settings, api_key=api_key)
    with (
        listening(app, settings) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, headers=headers) as client,
    ):
        yield client


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path / "router")


@pytest.fixture
def router(servers: list[Served], settings: Settings) -> Iterator[httpx.Client]:
    with routing(settings, *(server.url for server in servers)) as client:
        yield client


def asked(*ids: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "context_cache", "id": each} for each in ids]
    content = [*parts, {"type": "text", "text": "What?"}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 3,
        "temperature": 0,
        **fields,
    }


def replica(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvlinker-replica"]


def test_requests_go_where_their_chunks_are(
    router: httpx.Client, servers: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody else asks: a report that is made just when an answer ends may count it."""
    report = Router.report

    def idle(router: Router, *told: Any, **figures: Any) -> bool:
        return report(router, *told, **figures | {"running": 0, "waiting": 0})

    monkeypatch.setattr(Router, "report", idle)
    places = {}
    for text in TEXTS:
        made = router.post("/v1/context_caches", json={"chunks": [text]})
        places[made.json()["data"][0]["id"]] = replica(made)
    wait_until(lambda: sum(each["resident_chunks"] for each in status(router)) == len(TEXTS))
    for cache_id, place in places.items():
        assert replica(router.post(CHAT, json=asked(cache_id))) == place
    documents = {"documents": [{"text": TEXTS[0] + "again"}]}
    first = replica(router.post(CHAT, json=asked(**documents)))
    answers = [router.post(CHAT, json=asked(**documents)) for _ in range(4)]
    assert {replica(answer) for answer in answers} == {first}
    straight = servers[0].post(CHAT, asked(*places)).json()
    assert router.post(CHAT, json=asked(*places)).json()["choices"] == straight["choices"]


def test_plain_passages_go_to_the_server_that_made_them_chunks(
    tmp_path: Path, settings: Settings
) -> None:
    """Joined texts without any mark, in another order and company each time."""
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            own = tiny_settings(tmp_path / f"server {number}", implicit="auto")
            servers.append(stack.enter_context(serving(LLM.from_model(tiny_model(), own), own)))
        client = stack.enter_context(routing(settings, *(server.url for server in servers)))
        wait_until(lambda: all(each["epoch"] for each in status(client)))

        def asks(question: str, *texts: str) -> httpx.Response:
            content = "\n\n".join([question, *(text * 2 for text in texts)])
            turns = [{"role": "user", "content": content}]
            return client.post(CHAT, json={"messages": turns, "max_tokens": 1})

        def cached(answer: httpx.Response) -> int:
            tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

        first = replica(asks("Who?", TEXTS[0], TEXTS[1]))
        second = asks("What?", TEXTS[1], TEXTS[0])
        assert replica(second) == first
        for number, url in enumerate(server.url for server in servers):
            if urlsplit(url).netloc == first:
                names = servers[number].llm.residency.report().chunks.values()
                assert sum(bool(chunk.names) for chunk in names) == 2
        third = asks("Where?", TEXTS[2], TEXTS[0])
        assert replica(third) == first
        assert cached(third) > 100


@pytest.mark.whole
def test_a_server_that_joins_has_the_hottest_chunks_before_it_gets_requests(
    tmp_path: Path, settings: Settings
) -> None:
    """One that shares the state directory with the first: on disk it has them all."""
    with ExitStack() as stack:
        own = tiny_settings(tmp_path / "shared")

        def started() -> Served:
            return stack.enter_context(serving(LLM.from_model(tiny_model(), own), own))

        first = started()
        urls = [first.url]

        async def find() -> list[str]:
            return urls

        app = create_router(find, settings, api_key=None)
        url = stack.enter_context(listening(app, settings))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
        ids = first.cache(*TEXTS)
        wait_until(lambda: sum(each["resident_chunks"] for each in status(client)) == len(ids))
        for _ in range(3):
            assert client.post(CHAT, json=asked(*ids[:4])).status_code == 200
        first.llm.store.flush()
        second = started()
        keys = [first.llm.caches.get(each, tenant="default").chunk_key for each in ids]
        assert not any(map(second.llm.store.is_resident, keys))

        def joined() -> bool:
            told = next((each for each in status(client) if each["address"] == second.url), None)
            return told is not None and told["state"] == "ready"

        urls.append(second.url)
        wait_until(joined)
        assert [second.llm.store.is_resident(key) for key in keys] == [True] * 4 + [False] * 2


def test_a_chunk_on_disk_draws_requests_too(tmp_path: Path, settings: Settings) -> None:
    """Where each server has a disk of its own, and one of them little memory."""
    with ExitStack() as stack:
        servers = []
        for number, memory in enumerate((256 * 2**20, 2**17)):
            own = tiny_settings(
                tmp_path / f"server {number}", host_memory=memory, implicit="marked"
            )
            servers.append(stack.enter_context(serving(LLM.from_model(tiny_model(), own), own)))
        small = servers[1]
        document = {"documents": [{"text": TEXTS[0] * 2}]}
        for text in (TEXTS[0] * 2, *(other * 2 for other in TEXTS[1:])):
            small.post(CHAT, asked(documents=[{"text": text}]))
        small.llm.store.flush()
        report = small.llm.residency.report()
        assert {chunk.tiers for chunk in report.chunks.values()} >= {("disk",), ("memory",)}
        client = stack.enter_context(routing(settings, *(server.url for server in servers)))
        wait_until(lambda: all(each["epoch"] for each in status(client)))
        assert replica(client.post(CHAT, json=asked(**document))) == urlsplit(small.url).netloc


def status(router: httpx.Client) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = router.get("/status").json()["replicas"]
    return replicas


@pytest.mark.whole
def test_servers_come_and_go(servers: list[Served], settings: Settings) -> None:
    """One that is found no more gets requests until it ends; then it is forgotten."""
    found = [servers[0].url]

    async def find() -> list[str]:
        if not found:
            raise OSError("nobody tells")
        return found

    with routing_to(find, settings) as client:
        first = replica(client.post(CHAT, json=asked()))
        assert servers[0].url.endswith(first)
        found[:] = [server.url for server in servers]
        wait_until(lambda: [each["state"] for each in status(client)] == ["ready"] * 2)
        found.clear()
        assert replica(client.post(CHAT, json=asked()))
        found[:] = [servers[1].url]
        servers[0].llm.close()
        wait_until(lambda: len(status(client)) == 1)
        assert servers[1].url.endswith(replica(client.post(CHAT, json=asked())))


def test_streams_and_other_routes_pass_through(router: httpx.Client) -> None:
    with router.stream("POST", CHAT, json=asked(stream=True)) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert router.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert router.get("/v1/context_caches", params={"limit": 1}).status_code == 200
    missing = router.get("/v1/context_caches/cc_none")
    assert missing.status_code == 404
    assert len(missing.headers.get_list("x-request-id")) == 1
    assert router.get("/health").json() == {"status": "ok"}
    assert router.post(CHAT, content=b"{not json").status_code == 400


def test_compressed_bodies_are_routed_by_what_they_hold(router: httpx.Client) -> None:
    body = gzip.compress(json.dumps(asked()).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    first, again = (router.post(CHAT, content=body, headers=headers) for _ in range(2))
    assert first.status_code == 200, first.text
    assert replica(first) == replica(again) == replica(router.post(CHAT, json=asked()))
    assert router.post(CHAT, content=b"?", headers=headers).status_code == 400
    bomb = gzip.compress(b" " * (LEAST_PROMPT_BODY_BYTES + 1))
    assert router.post(CHAT, content=bomb, headers=headers).status_code == 413
    other = router.post(CHAT, content=body, headers=headers | {"Content-Encoding": "br"})
    assert other.status_code == 415
    assert "gzip" in other.headers["accept-encoding"]


def test_router_and_server_log_one_id(
    router: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvlinker"):
        new = router.post(CHAT, json=asked(stream=True))
        kept = router.post(CHAT, json=asked(stream=True), headers={"X-Request-Id": "mine"})
        ids = [each for answer in (new, kept) for each in answer.headers.get_list("x-request-id")]
        words = [f"id={each}" for each in ids]
        wait_until(lambda: all(sum(w in m for m in caplog.messages) == 2 for w in words))
    assert len(ids) == 2
    assert ids[1] == "mine"


def test_a_client_that_leaves_ends_its_request(router: httpx.Client, servers: list[Served]) -> None:
    reasons: list[str] = []
    for server in servers:
        server.llm.events.subscribe(
            lambda event: (
                reasons.append(event.reason) if isinstance(event, RequestFinished) else None
            )
        )
    for stream in (False, True):
        with socket.create_connection(
            (router.base_url.host, router.base_url.port or 80), timeout=PATIENCE
        ) as client:
            body = json.dumps(asked(max_tokens=1900, ignore_eos=True, stream=stream)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: any(server.llm.current_load().running for server in servers))
        for server in servers:
            server.wait_until_idle()
    wait_until(lambda: len(reasons) == 2)
    assert reasons == ["cancelled", "cancelled"]


def test_a_server_that_is_gone_is_passed_over(
    router: httpx.Client, servers: list[Served], settings: Settings
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with routing(settings, gone, servers[0].url) as client:
        assert {replica(client.post(CHAT, json=asked())) for _ in range(3)} == {
            urlsplit(servers[0].url).netloc
        }
        states = {each["address"]: each["state"] for each in status(client)}
        assert states == {gone: "starting", servers[0].url: "ready"}
    with routing(settings, gone) as client:
        assert client.get("/health").status_code == 503
        refused = client.post(CHAT, json=asked())
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert "no replica is ready" in refused.json()["error"]["message"]


def test_builders_alone_answer_nothing(tmp_path: Path, settings: Settings) -> None:
    """They take creations; the router's health says why it takes nothing else."""
    own = tiny_settings(tmp_path, role="build", object_url=f"file://{tmp_path / 'objects'}")
    llm = LLM.from_model(tiny_model(), own)
    with serving(llm, own) as builder, routing(settings, builder.url) as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "all replicas that are ready are builders"}
        refused = client.post(CHAT, json=asked())
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert [(each["role"], each["state"]) for each in status(client)] == [("build", "ready")]
        assert "are builders" in refused.json()["error"]["message"]
        made = client.post("/v1/context_caches", json={"chunks": TEXTS[:1]})
        assert replica(made) == urlsplit(builder.url).netloc


HEALTHY = b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'
HEADERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
BEGUN = HEADERS + b"6\r\ndata: \r\n"
ENDING = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 35\r\nx-kvlinker-refused: yes\r\n\r\n"
    b'{"error": {"code":"engine_closed"}}'
)


NOWHERE = b"HTTP/1.1 302 Found\r\nLocation: http:login\r\nContent-Length: 0\r\n\r\n"


@contextmanager
def failing(answer: bytes, asked_for: list[bytes] | None = None) -> Iterator[str]:
    """A server that is healthy, answers each request with these bytes, and closes; the requests are
    added to ``asked_for``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    request = connection.recv(65536)
                    health = request.startswith((b"GET /health", b"GET /v1/residency"))
                    if asked_for is not None and not health:
                        asked_for.append(request)
                    connection.sendall(HEALTHY if health else answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.whole
def test_what_has_no_first_byte_is_tried_elsewhere(
    servers: list[Served], settings: Settings, subtests: pytest.Subtests
) -> None:
    answers = {"cut": b"", "draining": ENDING, "headers": HEADERS, "no address": NOWHERE}
    for (name, answer), path in product(answers.items(), (CHAT, "/v1/messages")):
        with (
            subtests.test(name, path=path),
            failing(answer) as bad,
            routing(settings, bad, servers[0].url) as client,
        ):
            sent = {replica(client.post(path, json=asked(model="tiny"))) for _ in range(6)}
            assert sent == {urlsplit(servers[0].url).netloc}


def test_what_is_refused_before_it_began_is_tried_elsewhere(
    servers: list[Served], settings: Settings
) -> None:
    with failing(ENDING) as bad, routing(settings, bad, servers[0].url) as client:
        for number in range(6):
            made = client.post("/v1/context_caches", json={"chunks": [f"Text {number}."]})
            assert replica(made) == urlsplit(servers[0].url).netloc


def test_an_encoded_answer_is_passed_on_as_it_is(settings: Settings) -> None:
    """A proxy before a server may compress whatever the router asks for."""
    body = gzip.compress(b'{"choices": []}')
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    with failing(head.encode() + body) as server, routing(settings, server) as client:
        assert client.post(CHAT, json=asked()).json() == {"choices": []}


def test_a_request_that_ends_servers_does_not_end_all(settings: Settings) -> None:
    sent: list[bytes] = []
    with ExitStack() as stack:
        bad = [stack.enter_context(failing(b"", sent)) for _ in range(5)]
        client = stack.enter_context(routing(settings, *bad))
        assert client.post(CHAT, json=asked()).status_code == 503
    assert len(sent) == MOST_TRIES


def test_no_target_names_another_host(settings: Settings) -> None:
    reached: list[bytes] = []
    with (
        failing(HEALTHY, reached) as foreign,
        failing(HEALTHY) as own,
        routing(settings, own) as client,
    ):
        address = client.base_url
        target = f"@{urlsplit(foreign).netloc}/latest"
        with socket.create_connection((address.host, address.port or 80), timeout=PATIENCE) as raw:
            raw.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert raw.recv(65536).startswith(b"HTTP/1.1 400")
    assert reached == []


def test_cookies_of_one_client_are_not_anothers(settings: Settings) -> None:
    sent: list[bytes] = []
    answer = HEALTHY.replace(b"Connection", b"Set-Cookie: session=anna\r\nConnection")
    with failing(answer, sent) as server, routing(settings, server) as client:
        for _ in range(2):
            assert client.get("/v1/models", headers={"Cookie": ""}).status_code == 200
            client.cookies.clear()
    assert len(sent) == 2
    assert not any(b"session" in request for request in sent)
    assert all(b"accept-encoding: identity" in request.lower() for request in sent)


def test_a_body_without_end_of_turns_is_looked_at_in_part(router: httpx.Client) -> None:
    answer = router.post(CHAT, json={"messages": [1] * 200_000, "max_tokens": 1})
    assert answer.status_code == 400


def test_what_may_have_been_done_is_not_done_twice(settings: Settings) -> None:
    for answer, code in (
        (b"", "replica_lost"),
        (ENDING.replace(b"x-kvlinker-refused", b"x-other"), "engine_closed"),
    ):
        sent: list[bytes] = []
        with failing(answer, sent) as bad, routing(settings, bad) as client:
            refused = client.post("/v1/context_caches", json={"chunks": ["once"]})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == code
        assert len(sent) == 1


def openai_error(lines: list[str]) -> dict[str, Any]:
    assert lines[-1] == "data: [DONE]"
    error: dict[str, Any] = json.loads(lines[-2].removeprefix("data: "))["error"]
    return error


def messages_error(lines: list[str]) -> dict[str, Any]:
    assert lines[-2] == "event: error"
    event: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    assert event["type"] == "error"
    return {"code": "replica_lost", **event["error"]}


def responses_error(lines: list[str]) -> dict[str, Any]:
    assert lines[-2] == "event: error"
    event: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    assert event["type"] == "error"
    return event


@pytest.mark.parametrize(
    ("path", "error_of"),
    [
        (CHAT, openai_error),
        ("/v1/completions", openai_error),
        ("/v1/messages", messages_error),
        ("/v1/responses", responses_error),
    ],
)
def test_a_stream_that_loses_its_replica_says_so(
    settings: Settings, path: str, error_of: Callable[[list[str]], dict[str, Any]]
) -> None:
    with (
        failing(BEGUN) as bad,
        routing(settings, bad) as client,
        client.stream("POST", path, json=asked(stream=True)) as stream,
    ):
        assert stream.status_code == 200
        error = error_of([line for line in stream.iter_lines() if line])
    assert error["code"] == "replica_lost"
    assert "Ask again" in error["message"]


def test_pages_of_other_origins_may_ask_first(servers: list[Served], settings: Settings) -> None:
    """A browser's preflight brings no key."""
    origin = "https://app.example"
    keyed = settings.model_copy(update={"api_keys": ("key",), "cors_origins": (origin,)})
    with routing(keyed, servers[0].url) as client:
        asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        allowed = client.options(CHAT, headers=asking)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == origin
        answer = client.post(
            CHAT, json=asked(), headers={"Origin": origin, "Authorization": "Bearer key"}
        )
        assert answer.headers.get_list("Access-Control-Allow-Origin") == [origin]


def test_bodies_are_limited_before_they_are_passed_on(router: httpx.Client) -> None:
    """As the servers limit them, by route."""
    too_much = b"x" * (LEAST_PROMPT_BODY_BYTES + 1)
    assert router.post(CHAT, content=too_much).status_code == 413
    assert router.post("/v1/context_caches", content=too_much).status_code == 400
    address = router.base_url
    with socket.create_connection((address.host, address.port or 80), timeout=PATIENCE) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 300000000\r\n\r\n{"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def test_the_access_log_tells_which_replica_and_why(
    router: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, access_log.__name__)
    made = router.post("/v1/context_caches", json={"chunks": TEXTS[:1]}).json()["data"]
    answer = router.post(CHAT, json=asked(made[0]["id"]))

    def told() -> list[tuple[str, str]]:
        requests = [getattr(record, "request", {}) for record in caplog.records]
        return [(each["route"], each["replica"]) for each in requests if "replica" in each]

    wait_until(lambda: len(told()) == 2)
    route, reason = told()[1]
    assert route == CHAT
    assert re.fullmatch(rf"{replica(answer)}: [01] of 1 chunks(, 1 to load)?", reason)


def test_keys_are_checked_at_the_router_and_passed_on(tmp_path: Path) -> None:
    keys = {"api_keys": ("key-a", "key-b"), "admin_keys": ("root",)}
    settings = tiny_settings(tmp_path, policy="legolink-4").model_copy(update=keys)
    with (
        serving(LLM.from_model(tiny_model(), settings), settings) as server,
        routing(settings, server.url, api_key="root") as client,
    ):
        assert client.post(CHAT, json=asked()).status_code == 401
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
        made = client.post("/v1/context_caches", json={"chunks": [TEXTS[0]]}, headers=mine)
        cache_id = made.json()["data"][0]["id"]
        assert client.post(CHAT, json=asked(cache_id), headers=mine).status_code == 200
        assert client.post(CHAT, json=asked(cache_id), headers=theirs).status_code == 404
        assert client.get("/v1/residency", headers=mine).status_code == 403
        preload = {"chunks": ["0" * 64]}
        refused = client.post("/v1/residency/preload", json=preload, headers=mine)
        assert refused.status_code == 403
        root = {"Authorization": "Bearer root"}
        taken = client.post("/v1/residency/preload", json=preload, headers=root)
        assert taken.status_code == 202
        malformed = client.post("/v1/residency/preload", json={"chunks": ["x"]}, headers=root)
        assert malformed.status_code == 400
        wait_until(lambda: client.get("/status", headers=mine).json()["replicas"][0]["epoch"])


def test_kept_answers_are_found_at_any_server_and_go_on_where_they_were_given(
    router: httpx.Client,
) -> None:
    """Where all else is equal, chance decides."""
    least: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1}
    for stream in (False, True):
        answer = router.post("/v1/responses", json=least | {"stream": stream})
        found = re.search(r'"id":"(resp_[^"]+)"', answer.text)
        assert found
        path, more = f"/v1/responses/{found[1]}", least | {"previous_response_id": found[1]}
        went = [router.post("/v1/responses", json=more) for _ in range(4)]
        assert {each.status_code for each in went} == {200}
        assert {each.headers["x-kvlinker-replica"] for each in went} == {
            answer.headers["x-kvlinker-replica"]
        }
        read: set[str] = set()
        while len(read) < 2:
            told = router.get(path)
            assert told.json()["id"] == found[1]
            read.add(told.headers["x-kvlinker-replica"])
    assert router.delete(path).json()["deleted"]
    assert router.get(path).status_code == 404
