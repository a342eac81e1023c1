"""What the embedded engine's server promises, vLLM's keeps: the same tests, and the same client."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.server.serving import Served
from tests.server.test_completions import *  # noqa: F403
from tests.server.test_context_caches import *  # noqa: F403
from tests.server.test_context_caches import PATH, create
from tests.server.test_openai_client import *  # noqa: F403


def tier(served: Served, name: str) -> dict[str, Any]:
    return next(tier for tier in served.get("/status").json()["tiers"] if tier["name"] == name)


def test_creation(served: Served) -> None:  # type: ignore[no-redef]
    """Chunks lie on the disk, where vLLM's processes find them, and not in this one's memory."""
    first, second = create(served, chunks=["The cat sat on the mat.", "A dog"], name="pets", metadata={"k": "v"})
    assert first["bytes"] > second["bytes"] > 0
    assert first["tier"] == second["tier"] == "disk"
    assert served.get(f"{PATH}/{first['id']}").json() == first
    assert tier(served, "host")["chunks"] == 0


def test_same_content_is_stored_once(served: Served) -> None:  # type: ignore[no-redef]
    before = tier(served, "disk")["chunks"]
    entries = create(served, chunks=["the same words"] * 2)
    assert tier(served, "disk")["chunks"] == before + 1
    for entry in entries:
        served.http.delete(f"{PATH}/{entry['id']}")
    assert tier(served, "disk")["chunks"] == before
