"""POST /v1/embeddings: as OpenAI's client calls it; what is refused; whose turn it is."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import NotFoundError, OpenAI

from fleet_tests.test_routing_over_http import routing
from kvlinker.doors.http.models import EmbeddingTurns
from kvlinker.llm import LLM
from kvlinker.service.embedding import BATCH_TEXTS, Embedder
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.toy_embedders import LONGEST, sentence_model, synonyms
from tests.waiting import PATIENCE, wait_until

pytest.importorskip(
    "sentence_transformers", reason="needs the extra: pip install 'kvlinker[embeddings]'"
)

PATH = "/v1/embeddings"
KEYS = ("key-anna", "key-bert")
TEXTS = ["A cat.", "The dog sat on the mat, and was fine.", "alpha beta gamma"]


class Embedding(NamedTuple):
    """A server with an embedding model, and its requests for embeddings."""

    served: Served
    turns: EmbeddingTurns


@contextmanager
def starting(folder: Path, **options: Any) -> Iterator[Embedding]:
    model = str(sentence_model(folder / "tiny-embedder"))
    settings = tiny_settings(folder / "state", embedding_model=model, **options)
    turns = EmbeddingTurns(settings.max_waiting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlinker.doors.http.app.EmbeddingTurns", lambda _: turns)
        with serving(LLM.from_model(tiny_model(), settings), settings) as served:
            yield Embedding(served, turns)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedding]:
    with starting(tmp_path_factory.mktemp("embedding"), max_waiting=4) as running:
        yield running


@pytest.fixture
def embedding(started: Embedding) -> Served:
    return started.served


@pytest.fixture
def client(embedding: Served) -> OpenAI:
    return OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0)


def embedder_of(served: Served) -> Embedder:
    assert served.llm.embedder is not None
    return served.llm.embedder


def test_openais_client_gets_vectors(embedding: Served, client: OpenAI) -> None:
    expected = embedder_of(embedding).embed(TEXTS)
    plain = client.embeddings.create(model="tiny-embedder", input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model="default", input=TEXTS)  # the client asks for base64
    for answer in (plain, packed):
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.model == "tiny-embedder"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
        found = np.array([each.embedding for each in answer.data], np.float32)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    short = client.embeddings.create(model="default", input=TEXTS[0], dimensions=8)
    np.testing.assert_allclose(
        short.data[0].embedding,
        embedder_of(embedding).embed(TEXTS[:1], dimensions=8)[0],
        atol=1e-5,
    )
    assert client.models.retrieve("tiny-embedder").id in [each.id for each in client.models.list()]


def test_vectors_may_be_packed(embedding: Served) -> None:
    (plain,) = embedding.post(PATH, {"input": "a", "user": "me"}).json()["data"]
    packed = embedding.post("/embeddings", {"input": "a", "encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), plain["embedding"], atol=1e-6)


WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 400, "input", "required"),
    ({"input": ""}, 400, "input", "at least 1"),
    ({"input": []}, 400, "input", "at least 1"),
    ({"input": ["a", ""]}, 400, "input.1", "at least 1"),
    ({"input": {"a": 1}}, 400, "input", "a text, or a list"),
    ({"input": [5, 6]}, 400, "input", "check_embedding_ctx_length=False"),
    ({"input": ["a", 1]}, 400, "input.1", "string"),
    ({"input": ["a"] * 2049}, 400, "input", "2048"),
    ({"input": [[5], [6]]}, 400, "input", "check_embedding_ctx_length=False"),
    ({"input": ["a", "word " * 2 * LONGEST]}, 400, "input.1", "Shorten it"),
    ({"input": "word " * 10**5}, 400, "input.0", "characters"),
    ({"input": "a", "dimensions": 33}, 400, "dimensions", "1 to 32"),
    ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "base64"),
    ({"input": "a", "model": "tiny"}, 404, "model", "'tiny-embedder'"),
]


def test_what_is_wrong_is_named(embedding: Served, subtests: pytest.Subtests) -> None:
    for body, status, param, said in WRONG:
        with subtests.test(f"{param}: {said}"):
            answer = embedding.post(PATH, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), error
            assert said in error["message"]


def test_without_a_model_the_reason_is_told(served: Served) -> None:
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(NotFoundError, match="--embedding-model PATH") as raised:
        client.embeddings.create(model="any", input="a")
    assert raised.value.code == "embeddings_off"


class Gate:
    """Stands before each batch of an embedder: batches wait until they are let through."""

    def __init__(self, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Semaphore(0)
        self.texts: list[list[str]] = []
        compute = embedder._compute

        def gated(texts: list[str], role: Any) -> NDArray[np.float32]:
            self.texts.append(texts)
            assert self.opened.acquire(timeout=PATIENCE)
            return compute(texts, role)

        monkeypatch.setattr(embedder, "_compute", gated)

    def open(self) -> None:
        for _ in range(1000):
            self.opened.release()


@pytest.fixture
def gate(embedding: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(embedder_of(embedding), monkeypatch)
    yield made
    made.open()
    wait_until(lambda: embedding.post(PATH, {"input": "a"}).status_code == 200)


def test_nobody_else_waits(embedding: Served, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(embedding.post, PATH, {"input": TEXTS})
        wait_until(lambda: len(gate.texts) == 1)
        message = {"role": "user", "content": "Hi"}
        chat = {"messages": [message], "max_tokens": 2}
        assert embedding.post("/v1/chat/completions", chat).status_code == 200
        gate.open()
        assert waiting.result().status_code == 200


def test_more_than_may_wait_are_refused(embedding: Served, gate: Gate) -> None:
    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(embedding.post, PATH, {"input": "a"}) for _ in range(5)]
        refused = next(as_completed(asked, timeout=PATIENCE)).result()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        gate.open()
        assert sorted(each.result().status_code for each in asked) == [200] * 4 + [429]


def test_a_client_that_leaves_costs_one_batch(started: Embedding, gate: Gate) -> None:
    embedding = started.served
    address = urlsplit(embedding.url)
    body = json.dumps({"input": ["left"] * 4 * BATCH_TEXTS}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: len(gate.texts) == 1)
    with ThreadPoolExecutor(1) as thread:
        wait_until(lambda: started.turns._open == 0)
        other = thread.submit(embedding.post, PATH, {"input": "other"})
        gate.open()
        assert other.result().status_code == 200
    assert gate.texts[1:] == [["other"]]


def test_tenants_take_turns_and_need_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with starting(tmp_path, api_keys=KEYS) as (served, turns):
        assert served.post(PATH, {"input": "a"}).status_code == 401
        gate = Gate(embedder_of(served), monkeypatch)

        def ask(key: str, *texts: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return served.post(PATH, {"input": texts}, headers=headers).status_code

        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask, KEYS[0], *["anna"] * 2 * BATCH_TEXTS)]
            wait_until(lambda: len(gate.texts) == 1)
            asked += [threads.submit(ask, key, key) for key in KEYS]
            wait_until(lambda: turns._open == 3)
            gate.open()
            assert [each.result() for each in asked] == [200] * 3
        assert [texts[0] for texts in gate.texts].index(KEYS[1]) == 1


def test_a_router_passes_embeddings_on(embedding: Served, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path / "router")
    with routing(settings, embedding.url) as router:
        answer = router.post(PATH, json={"input": TEXTS})
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 3


def test_search_over_http_finds_by_meaning(tmp_path: Path) -> None:
    model = synonyms(tmp_path / "synonyms")
    settings = tiny_settings(tmp_path / "state", embedding_model=str(model))
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        automobile, _ = served.cache("The automobile is red.", "Nothing to say.")
        served.llm.caches.settle()
        hits = served.post("/v1/context_caches/search", {"query": "car", "limit": 1}).json()["data"]
    assert [hit["id"] for hit in hits] == [automobile]
