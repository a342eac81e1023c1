"""What is created at the same time."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.waiting import PATIENCE


def test_lists_that_go_on_do_not_skip_what_took_long_to_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun first may come last."""
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path)) as llm:
        slow: Future[int] = Future()
        compute = llm.engine.cache_chunk
        monkeypatch.setattr(llm.engine, "cache_chunk", lambda *_, **__: slow)
        options: dict[str, Any] = {
            **{"owner": "default", "expires_at": None, "name": None, "metadata": None},
            **{"context": None, "pinned": False, "advance": lambda: None},
        }
        begun = llm.caches.creation.begin(["begun first"], **options)
        monkeypatch.setattr(llm.engine, "cache_chunk", compute)
        (quick,) = llm.generate_context_cache(["begun second"])
        (last,) = llm.list_caches(order="asc").items
        assert last == quick
        slow.set_result(4)
        (late,) = begun.result(PATIENCE)
        assert llm.list_caches(order="asc", after=last.id).items == (late,)
        assert late.created_at >= quick.created_at
