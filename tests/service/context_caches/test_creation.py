"""What is created at the same time."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
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
        begun = llm.caches.create(["begun first"], tenant="default")
        monkeypatch.setattr(llm.engine, "cache_chunk", compute)
        (quick,) = llm.generate_context_cache(["begun second"])
        (last,) = llm.list_caches(order="asc").items
        assert last == quick
        slow.set_result(4)
        (late,) = begun.result(PATIENCE)
        assert llm.list_caches(order="asc", after=last.id).items == (late,)
        assert late.created_at >= quick.created_at


def test_a_life_begins_when_all_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes longer than its life can still be used; a given end of life stays."""
    end = time.time() + 5000.0
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path)) as llm:
        slow: Future[int] = Future()
        monkeypatch.setattr(llm.engine, "cache_chunk", lambda *_, **__: slow)
        ttl: float = np.float32(60)  # type: ignore[assignment]
        short = llm.caches.create(["a life of a minute"], tenant="default", ttl=ttl)
        fixed = llm.caches.create(["until then"], tenant="default", expires_at=end)
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + 1000.0)
        slow.set_result(4)
        (cache,) = short.result(PATIENCE)
        assert cache.expires_at == cache.created_at + 60.0
        assert type(cache.expires_at) is float, "an fp32 cannot be kept"
        assert fixed.result(PATIENCE)[0].expires_at == end
        assert llm.caches.get(cache.id, tenant="default") == cache
