"""The sweep of what is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from kvlinker.service.context_caches import maintenance
from tests.doors.http.serving import tiny_model, tiny_settings


def test_many_that_expire_at_once_are_removed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "EXPIRED_AT_ONCE", 2)
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path)) as llm:
        for each in llm.generate_context_cache([f"text {number}" for number in range(5)]):
            llm.catalog.update(each.id, each.tenant, time.time(), expires_at=time.time() - 1)
        parts: list[int] = []
        expire = llm.catalog.expire

        def noting(now: float, **options: Any) -> tuple[int, tuple[str, ...]]:
            removed = expire(now, **options)
            parts.append(removed[0])
            return removed

        monkeypatch.setattr(llm.catalog, "expire", noting)
        assert llm.caches.sweep() == 5
        assert parts == [2, 2, 1]
        assert llm.caches.sweep() == 0
        llm.store.flush()
        assert not llm.store.keys()
