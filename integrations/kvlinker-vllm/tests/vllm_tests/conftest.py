"""The server's tests get vLLM: its engine in processes of its own, over the tiny model that the
others use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.doors.http.serving import MARKS, Served, serving, tiny_model, tiny_settings

from kvlinker.llm import LLM
from kvlinker.settings import Settings

HEAD_DIM = 32
"""The smallest that vLLM's attention on CPUs takes."""
POLICY = "legolink-4"

OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 512 << 20, "block_size": 32}
"""vLLM's options for small models. A share of the memory instead would depend on what the machine
has, and on what the engine's code takes of it."""


@pytest.fixture(scope="session")
def vllm_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of an engine on the tiny model, in fp32."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(head_dim=HEAD_DIM, marks=MARKS, dtype="float32")
    model.model.save_pretrained(folder / "tiny")
    model.tokenizer.save_pretrained(folder / "tiny")
    return vllm_settings_for(folder / "tiny", folder / "state")


def vllm_settings_for(model: Path, state: Path, **options: object) -> Settings:
    return tiny_settings(
        state,
        **(
            {
                "model": str(model),
                "engine": "vllm",
                "dtype": "float32",
                "prefix_cache": "on",  # as vLLM has it where nothing is set
                "vllm_options": OPTIONS,
            }
            | options
        ),
    )


def embedded_settings(settings: Settings, **update: object) -> Settings:
    """Of an embedded engine on the same model and the same state directory, which keeps no
    prefixes."""
    changed = {"engine": "embedded", "vllm_options": {}, "prefix_cache": "off"} | update
    return settings.model_copy(update=changed)


@pytest.fixture(scope="session")
def served(vllm_settings: Settings) -> Iterator[Served]:
    """A server without keys, on vLLM."""
    with serving(LLM.from_settings(vllm_settings), vllm_settings) as running:
        yield running


class _Lent:
    """An engine that another LLM has, and closes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


class _LentSource:
    """Lends the engine of an LLM."""

    uses_host_memory = False
    device = None

    def __init__(self, llm: LLM) -> None:
        self.tokenizer = llm.tokenizer
        self.sampling_defaults = llm.sampling_defaults
        self._engine = llm.engine

    def make(self, *_: Any) -> Any:
        return _Lent(self._engine)


@pytest.fixture(scope="module")
def llm_with(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], LLM]]:
    """Makes an LLM on the same engine, whose model has another chat template. It has no chunks."""
    with ExitStack() as stack:

        def make(template: str) -> LLM:
            settings = tiny_settings(tmp_path_factory.mktemp("state"), chat_template=template)
            return stack.enter_context(LLM.from_source(_LentSource(served.llm), settings))

        yield make
