from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def faked(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server on the fake engine."""
    monkeypatch.setattr("kvlinker.service.startup.EmbeddedEngine", lambda *_, **__: engine)
    settings = tiny_settings(tmp_path)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running
