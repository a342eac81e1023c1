"""What is no model of transformers is refused with a way out, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig

from kvlinker.config import load_settings
from kvlinker.engine.model_files import read_config
from kvlinker.errors import ModelLoadError


def complaint(model: str | Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_config(load_settings(model=str(model)))
    return caught.value.message


def test_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model-Q4_K_M.gguf").touch()
    for model in (tmp_path / "weights", tmp_path / "weights" / "model-Q4_K_M.gguf", "someone/Qwen3-0.6B-GGUF"):
        text = complaint(model)
        assert text.startswith(f"{model} is GGUF")
        assert "weights=int4" in text


def test_other_places_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert complaint(tmp_path / "model.safetensors").startswith(f"{tmp_path}/model.safetensors is a file. Give")
    assert "has no config.json" in complaint(tmp_path)
    for model in (str(tmp_path / "nowhere"), "./nowhere", "models/of/mine"):
        assert complaint(model) == f"No model at {model}: there is no such folder."


@pytest.mark.parametrize("offline", [True, False])
def test_hub_ids_without_a_network(monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no files") from (LocalEntryNotFoundError("no network") if offline else KeyError("a key"))

    monkeypatch.setattr(AutoConfig, "from_pretrained", fails)
    text = complaint("someone/model")
    assert ("hf download someone/model --local-dir" in text) == offline
    assert "'someone/model'" in text
