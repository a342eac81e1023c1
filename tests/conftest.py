"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlinker.llm import LLM
from tests.redis_server import RedisServer
from tests.server.serving import Served, serving, tiny_model, tiny_settings


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without keys, on the real engine."""
    settings = tiny_settings(tmp_path_factory.mktemp("state"))
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


@pytest.fixture(scope="session")
def keyed(served: Served) -> Iterator[Served]:
    """The same LLM behind the keys ``key-alpha`` and ``key-beta``; requests go out without a key."""
    settings = served.llm.settings.model_copy(update={"api_keys": ("key-alpha", "key-beta")})
    with serving(served.llm, settings) as running:
        yield running


@pytest.fixture(scope="session")
def running_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(running_redis: RedisServer) -> RedisServer:
    """An empty one, for tests that leave it running."""
    running_redis.client.flushall()
    running_redis.client.config_set("maxmemory", 0)
    return running_redis


@pytest.fixture
def frail_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One for tests that harm it."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()
