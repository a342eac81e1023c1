"""Servers and folders that tests share. Heavy modules are imported by the fixtures that need them,
and only then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.doors.http.serving import Served
    from tests.postgres_server import PostgresServer
    from tests.redis_server import RedisServer

# Tests, and the processes that they start, compute in one thread each: others share the processors,
# and threads that compute together all wait for the one that is kept from going on. ``two_threads``
# is for what shall be exact in two.
for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[name] = "1"

# Kernels for GPUs are interpreted: none is expected here.
os.environ["TRITON_INTERPRET"] = "1"

# Examples are the same in every run, and a busy machine is no failure. ``--hypothesis-profile all``
# tries as many as each test wants.
for profile, most in (("core", 25), ("all", 100)):
    settings.register_profile(
        profile,
        max_examples=most,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("core")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """PyTorch, and our native code with it, computes in two threads, in all of Python's threads
    that begin meanwhile, such as an engine's."""
    import torch

    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever names no state directory gets one of this test process, never the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLINKER_STATE_DIR", str(tmp_path_factory.mktemp("default-state")))
        yield


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without keys, on the real engine."""
    from kvlinker.llm import LLM
    from tests.doors.http.serving import serving, tiny_model, tiny_settings

    settings = tiny_settings(tmp_path_factory.mktemp("state"))
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


@pytest.fixture(scope="session")
def keyed(served: Served) -> Iterator[Served]:
    """The same LLM behind the keys ``key-alpha`` and ``key-beta``; requests go out without a
    key."""
    from tests.doors.http.serving import serving

    settings = served.llm.settings.model_copy(update={"api_keys": ("key-alpha", "key-beta")})
    with serving(served.llm, settings) as running:
        yield running


@pytest.fixture(scope="session")
def running_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    from tests.redis_server import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(running_redis: RedisServer) -> RedisServer:
    """An empty one, for tests that leave it running."""
    from tests.redis_server import MAXMEMORY

    running_redis.client.flushall()
    running_redis.client.config_set("maxmemory", MAXMEMORY)
    running_redis.client.config_set("maxmemory-policy", "allkeys-lru")
    return running_redis


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One for tests that leave it running."""
    from tests.postgres_server import PostgresServer

    server = PostgresServer()
    yield server
    server.remove()


@pytest.fixture
def frail_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One for tests that harm it."""
    from tests.redis_server import RedisServer

    server = RedisServer(tmp_path)
    yield server
    server.kill()
