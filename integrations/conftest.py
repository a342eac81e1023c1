"""One server for all tests of integrations: ``kvlinker serve`` in a process of its own, with the
model in the box."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest
from integrations.sample_facts import FACTS
from tests.programs import kvlinker_serve


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address; frameworks that look into the environment find it there, too."""
    state = str(tmp_path_factory.mktemp("state"))
    environment = os.environ | {
        "KVLINKER_STATE_DIR": state,
        "OMP_NUM_THREADS": "1",
        "KVLINKER_LOG_LEVEL": "error",
    }
    with (
        kvlinker_serve(["--policy", "legolink-4"], environment) as url,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("KVLINKER_BASE_URL", f"{url}/v1")
        patch.setenv("HAYSTACK_TELEMETRY_ENABLED", "false")
        yield url


@pytest.fixture
def base_url(address: str) -> str:
    """The address of OpenAI's API on the server."""
    return f"{address}/v1"


@pytest.fixture(scope="session")
def facts(address: str) -> tuple[str, ...]:
    """The ids of context caches of ``FACTS``."""
    answer = httpx.post(
        f"{address}/v1/context_caches",
        json={"chunks": FACTS, "metadata": {"source": "facts"}},
        timeout=60,
    )
    return tuple(cache["id"] for cache in answer.raise_for_status().json()["data"])
