"""vLLM's first request is its last check: what it refuses then is said in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlinker.base.errors import ModelLoadError
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.settings import load_settings
from kvlinker_vllm.frontend import client
from kvlinker_vllm.frontend.client import OwnClient


class Engine:
    """Refuses every request, and log probabilities before."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_logprobs=0))
        self.is_up = True

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise ValueError("the prompt\nis too long")
        yield

    def shutdown(self) -> None:
        self.is_up = False


def test_a_vllm_that_refuses_its_first_request_is_ended_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = Engine(), list[SamplingParams]()

    async def start(*_: Any) -> Engine:
        return engine

    monkeypatch.setattr(client, "_start", start)
    monkeypatch.setattr(client, "_vllm_sampling", lambda sampling, *_: asked.append(sampling))
    with pytest.raises(ModelLoadError, match=r"does not answer with .*: the prompt is too long$"):
        OwnClient(load_settings(state_dir=tmp_path), None)
    assert not engine.is_up
    assert [each.logprobs for each in asked] == [None]
