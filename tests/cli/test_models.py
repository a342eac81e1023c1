"""``kvlinker pull`` and ``kvlinker models``, with a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.engines.contract.gguf_files import gguf_files
from kvlinker.settings import BUNDLED_MODEL
from tests.cli.hub import hub_of

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "max_position_embeddings": 2048}

REPOSITORIES = {
    "org/small": {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": b"x" * 5000,
        "pytorch_model.bin": b"x" * 5000,
        "tokenizer.json": b"{}",
        "onnx/model.onnx": b"x" * 5000,
        "README.md": b"read me",
    },
    "org/old": {"config.json": b"{}", "pytorch_model.bin": b"x" * 300},
    "org/small-GGUF": {"small.gguf": b"GGUF", "mmproj-small.gguf": b"GGUF"},
    "org/many-GGUF": {"small-Q4_0.gguf": b"x" * 40, "small-Q8_0.gguf": b"x" * 80},
    "org/nothing": {"README.md": b"read me"},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with hub_of(REPOSITORIES) as url:
        yield url


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache: an empty folder."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def reached(hub: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub answers."""
    reach(hub, monkeypatch)


def reach(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


def kvlinker(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_pull_downloads_what_loading_reads(reached: None) -> None:
    pulled = kvlinker("pull", "org/small")
    assert pulled.exit_code == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert "org/small: 3 files, 5.1 KB" in pulled.stderr
    assert "kvlinker run org/small" in pulled.stderr
    again = kvlinker("pull", "org/small")
    assert again.stdout == pulled.stdout
    assert "files" not in again.stderr, "nothing is downloaded twice"
    listed = kvlinker("models").stdout
    assert "org/small" in listed
    (line,) = [line for line in listed.splitlines() if line.startswith("org/small")]
    assert line.split() == ["org/small", "5.1", "KB", "2,048", "bfloat16", "(safetensors)"]


def test_pull_takes_pickled_weights_where_there_are_no_others(reached: None) -> None:
    pulled = kvlinker("pull", "org/old")
    assert (Path(pulled.stdout.strip()) / "pytorch_model.bin").stat().st_size == 300


def test_pull_takes_one_gguf_file(reached: None) -> None:
    for model, name in (
        ("org/small-GGUF", "small.gguf"),
        ("org/many-GGUF:q8_0", "small-Q8_0.gguf"),
    ):
        assert gguf_files("org/many-GGUF") == ()
        pulled = kvlinker("pull", model)
        assert pulled.exit_code == 0, pulled.stderr
        folder = Path(pulled.stdout.strip())
        assert [path.name for path in folder.iterdir()] == [name]
        assert gguf_files(model) == (folder / name,)
    listed = kvlinker("models").stdout
    assert "GGUF, damaged" in listed


def test_models_that_cannot_be_pulled(
    reached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for model, said in (
        ("org/none", "the hub has no model 'org/none'"),
        ("org/many-GGUF", "org/many-GGUF has several GGUF files: small-Q4_0.gguf, small-Q8_0.gguf"),
        ("org/many-GGUF:Q6_K", "org/many-GGUF has no GGUF file with 'Q6_K' in its name"),
        ("org/nothing", "org/nothing is no model of transformers: it has no config.json, nor"),
        ("a/b/c", "'a/b/c' is no id of the hub"),
        (tmp_path, "is on this machine"),
    ):
        with subtests.test(str(model)):
            refused = kvlinker("pull", model)
            assert refused.exit_code != 0
            assert said in refused.stderr
            assert "Traceback" not in refused.stderr
    reach("http://127.0.0.1:9", monkeypatch)
    unreachable = kvlinker("pull", "org/small")
    assert "Is the hub reachable?" in unreachable.stderr
    assert "Traceback" not in unreachable.stderr


def test_folders_are_listed(cache: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        folder.mkdir()
        text = {"max_position_embeddings": 4096, "torch_dtype": "float16"}
        (folder / "config.json").write_text(json.dumps({"text_config": text}))
    (whole / "pytorch_model.bin").write_bytes(b"x" * 2000)
    (tmp_path / "notes.txt").write_text("no folder")
    result = kvlinker("models", tmp_path)
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert lines[str(whole)][2:] == ["4,096", "float16", "(pickle)"]
    assert str(BUNDLED_MODEL) in lines
    assert str(part) not in lines, "without weights it is no model"
