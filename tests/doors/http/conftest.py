from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import MARKS, Served, serving, tiny_model, tiny_settings


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


@pytest.fixture(scope="module")
def llm_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LLM]]:
    """Makes an LLM whose model has a chat template, and the marks of calls and reasoning as
    tokens. vLLM's tests have another one."""
    with ExitStack() as stack:

        def make(template: str) -> LLM:
            settings = tiny_settings(tmp_path_factory.mktemp("state"), chat_template=template)
            return stack.enter_context(LLM.from_model(tiny_model(marks=MARKS), settings))

        yield make
