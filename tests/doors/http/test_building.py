"""/v1/chunks/build: a server computes what another one lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.serving import builder_client
from kvlinker.llm import LLM
from kvlinker.settings import load_settings
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer

BUILD = "/v1/chunks/build"
TEXT = "Document 1 says that the code of its door is 7919. " * 5


@pytest.fixture
def start(
    postgres_server: PostgresServer, redis_server: RedisServer, tmp_path: Path
) -> Iterator[Any]:
    """Starts servers on one catalog and one Redis."""
    catalog = postgres_server.new_database()
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> Served:
            settings = tiny_settings(
                tmp_path / name, catalog_url=catalog, redis_url=redis_server.url, **options
            )
            llm = LLM.from_model(tiny_model(), settings, builders=builder_client(settings))
            return stack.enter_context(serving(llm, settings))

        yield start


def key_of(served: Served, cache_id: str) -> str:
    return served.llm.caches.get(cache_id, tenant="default").chunk_key


def test_a_chunk_is_built_into_the_shared_tier(start: Any, redis_server: RedisServer) -> None:
    builder, other = start("builder", role="build"), start("other")
    key = key_of(other, other.cache(TEXT)[0])
    other.llm.store.flush()
    for number in range(3):
        redis_server.client.flushall()
        if number == 1:  # the builder has it in memory, and Redis has lost it
            assert builder.llm.store.is_resident(key)
        told = builder.post(BUILD, {"key": key})
        assert told.status_code == 200, told.text
        assert told.json()["key"] == key
        (shared,) = (tier for tier in builder.llm.store.slower_tiers() if tier.shared)
        assert shared.contains(key)


def test_what_is_not_in_the_catalog_is_not_built(start: Any) -> None:
    builder = start("builder")
    assert builder.post(BUILD, {"key": "ab" * 32}).status_code == 404
    assert builder.post(BUILD, {"key": "no key"}).status_code == 400


def test_only_builders_build_and_only_for_admins(start: Any) -> None:
    refused = start("server", role="serve").post(BUILD, {"key": "ab" * 32})
    assert refused.status_code == 403
    assert "its role is serve" in refused.json()["error"]["message"]
    keyed = start("keyed", api_keys="anna", admin_keys="root")
    for key, status in (("anna", 403), ("root", 404)):
        told = keyed.post(BUILD, {"key": "ab" * 32}, headers={"Authorization": f"Bearer {key}"})
        assert told.status_code == status


def test_what_a_builder_creates_is_shared_when_it_is_told(start: Any) -> None:
    builder, other = start("builder", role="build"), start("other")
    (cache_id,) = builder.cache(TEXT)
    (shared,) = (tier for tier in other.llm.store.slower_tiers() if tier.shared)
    assert shared.contains(key_of(builder, cache_id))


def test_a_server_loads_what_its_builder_built(start: Any) -> None:
    builder = start("builder", role="build")
    server = start("server", builders=builder.url, build_tokens=32)
    body = {
        "messages": [{"role": "user", "content": "Which code?"}],
        "documents": [{"text": TEXT}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = server.post("/v1/chat/completions", body).json()
    (chunk,) = answer["link"]["context_caches"]
    assert chunk["created"]
    assert builder.llm.store.is_resident(key_of(server, chunk["id"]))
    alone = start("alone")
    assert alone.post("/v1/chat/completions", body).json()["choices"] == answer["choices"]


def test_who_asks_builders() -> None:
    """A server whose settings name some, or for which some are found; none that builds itself."""
    assert builder_client(load_settings()) is None
    named = load_settings(builders="http://10.0.0.7:8000/,http://10.0.0.8:8000")
    asked = builder_client(named)
    assert asked is not None
    assert asked.urls() == ("http://10.0.0.7:8000", "http://10.0.0.8:8000")
    found = builder_client(named, lambda: ["http://10.0.0.9:1"])
    assert found is not None
    assert found.urls() == ["http://10.0.0.9:1"]
    assert builder_client(named.model_copy(update={"role": "build"})) is None
    with pytest.raises(InvalidRequestError, match="the vllm engine asks no builders"):
        load_settings(builders="http://10.0.0.7:8000", engine="vllm")
    for wrong in (
        "10.0.0.7:8000",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
    ):
        with pytest.raises(InvalidRequestError, match="is no address"):
            load_settings(builders=wrong)
