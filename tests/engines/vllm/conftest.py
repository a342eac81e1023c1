"""The server's tests get vLLM: its engine in processes of its own, over the tiny model that the
others use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlinker.llm import LLM
from kvlinker.settings import Settings
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

HEAD_DIM = 32
"""The smallest that vLLM's attention on CPUs takes."""
POLICY = "legolink-4"


@pytest.fixture(scope="session")
def vllm_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of an engine on the tiny model, in fp32."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(head_dim=HEAD_DIM)
    model.model.save_pretrained(folder / "tiny")
    model.tokenizer.save_pretrained(folder / "tiny")
    return vllm_settings_for(folder / "tiny", folder / "state")


def vllm_settings_for(model: Path, state: Path, **options: object) -> Settings:
    vllm_options = {"enforce_eager": True, "gpu_memory_utilization": 0.05, "block_size": 32}
    return tiny_settings(
        state,
        **(
            {
                "model": str(model),
                "engine": "vllm",
                "dtype": "float32",
                "vllm_options": vllm_options,
            }
            | options
        ),
    )


@pytest.fixture(scope="session")
def served(vllm_settings: Settings) -> Iterator[Served]:
    """A server without keys, on vLLM."""
    with serving(LLM.from_settings(vllm_settings), vllm_settings) as running:
        yield running
