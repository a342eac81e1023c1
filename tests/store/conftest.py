"""Servers that the store's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer


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
def frail_redis(tmp_path) -> Iterator[RedisServer]:
    """One for tests that harm it."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()
