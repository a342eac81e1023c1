"""What is no model of transformers is refused; the fingerprint of a model is that of its files,
which are read once."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from blake3 import blake3
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract import file_hashes
from kvlinker.engines.contract.file_hashes import FINGERPRINTS
from kvlinker.engines.contract.model_files import (
    choose_device,
    choose_dtype,
    fingerprint_of_files,
    read_model,
    read_tokenizer,
)
from kvlinker.engines.contract.model_place import check_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.settings import load_settings
from tests.toy_models import tiny_model


def complaint(model: str | Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_tokenizer(load_settings(model=str(model)))
    return caught.value.message


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, missing in ((0, "cuda"), (2, "cuda:2")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ModelLoadError, match=f"no device '{missing}'.* finds {count} GPUs"):
            choose_device(missing)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelLoadError, match="Unknown device 'gpu'"):
        choose_device("gpu")


def test_other_places_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert complaint(tmp_path / "model.safetensors").startswith(
        f"{tmp_path}/model.safetensors is a file. Give"
    )
    assert "has no config.json" in complaint(tmp_path)
    for model in (str(tmp_path / "nowhere"), "./nowhere", "models/of/mine"):
        assert complaint(model) == f"No model at {model}: there is no such folder."


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_text(pointer)
    assert complaint(tmp_path) == (
        f"{weights} is a pointer of Git LFS, not the file itself. Run `git lfs pull` in {tmp_path}."
    )
    weights.unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(64))
    assert "but no model.safetensors.index.json" in complaint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(pointer)
    assert complaint(tmp_path).startswith(f"{tmp_path}/tokenizer.json is a pointer")
    (tmp_path / "tokenizer.json").unlink()
    check_model(load_settings(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name(name: str) -> None:
    text = complaint(name)
    assert text.startswith("The setting model is empty.")
    assert "the model in the box is served" in text


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that knows no model; returns the paths that it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        set_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()


def set_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("ENDPOINT", "_HF_DEFAULT_ENDPOINT"):
        monkeypatch.setattr(huggingface_hub.constants, name, url)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that transformers is asked to load, all of which fail."""
    asked: list[str] = []

    def fails(model: str, **_: Any) -> None:
        asked.append(model)
        raise OSError("no such files")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    return asked


def test_a_hub_that_cannot_be_reached_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, loaded: list[str]
) -> None:
    """By us: transformers' loading waits and tries again for most of a minute."""
    set_hub(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    text = complaint("someone/model")
    assert (
        "'someone/model' is not on this machine, and the Hugging Face hub cannot be reached" in text
    )
    assert loaded == []


def test_what_the_hub_answers_is_left_to_the_loading(hub: list[str], loaded: list[str]) -> None:
    assert "no such files" in complaint("someone/model")
    assert (hub, loaded) == (["/someone/model/resolve/main/config.json"], ["someone/model"])


def test_a_revision_on_this_machine_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_hub(monkeypatch, "http://127.0.0.1:9")
    folder = tmp_path / "models--someone--model"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "snapshots" / "1" / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "v1").write_text("1")
    options = {"download_dir": str(tmp_path)}
    check_model(load_settings(model="someone/model", vllm_options={**options, "revision": "v1"}))
    with pytest.raises(ModelLoadError, match="is not on this machine"):
        check_model(load_settings(model="someone/model", vllm_options=options))


def test_a_model_on_this_machine_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loaded: list[str]
) -> None:
    set_hub(monkeypatch, "http://127.0.0.1:9")
    folder = tmp_path / "models--someone--model"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "snapshots" / "1" / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    check_model(load_settings(model="someone/model", vllm_options={"download_dir": str(tmp_path)}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    complaint("someone/model")
    assert loaded == ["someone/model"]


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.usefixtures("hub")
def test_hub_ids_without_a_network(monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no files") from (
            LocalEntryNotFoundError("no network") if offline else KeyError("a key")
        )

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fails)
    text = complaint("someone/model")
    assert ("hf download someone/model --local-dir" in text) == offline
    assert "'someone/model'" in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"hidden_size": 8, "transformers_version": "5"}')
    for part in (1, 2):
        (made / f"model-0000{part}-of-00002.safetensors").write_bytes(bytes([part]) * 1000)
    (made / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    return made


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files pass for older than they are."""
    monkeypatch.setattr(file_hashes, "SETTLED_SECONDS", -60.0)


def name_of(folder: Path, dtype: torch.dtype = torch.float32) -> str | None:
    return fingerprint_of_files(folder, dtype, state_dir=folder.parent / "state")


def test_a_copy_has_the_same_name(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.parent / "copy")
    (copy / "config.json").write_text('{"transformers_version": "6", "hidden_size": 8}')
    (copy / "consolidated.safetensors").unlink()
    (copy / "README.md").write_text("more")
    assert name_of(copy) == name_of(folder) != name_of(folder, torch.bfloat16)


@pytest.mark.parametrize("changed", ["config.json", "model-00002-of-00002.safetensors"])
def test_what_changes_the_model_changes_its_name(folder: Path, changed: str) -> None:
    before = name_of(folder)
    (folder / changed).write_bytes(
        (folder / changed).read_bytes().replace(b"8", b"9").replace(b"\2", b"\3")
    )
    assert name_of(folder) != before


@pytest.mark.usefixtures("settled")
def test_names_do_not_depend_on_how_files_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = name_of(folder)
    (folder.parent / "state" / FINGERPRINTS).unlink()
    monkeypatch.setattr(file_hashes, "HASHED_BYTES", 7)
    assert name_of(folder) == whole
    known = json.loads((folder.parent / "state" / FINGERPRINTS).read_text()).values()
    assert blake3(bytes([1]) * 1000).hexdigest() in known


@pytest.mark.usefixtures("settled")
def test_weights_are_read_once_until_they_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name_of(folder)
    memory = folder.parent / "state" / FINGERPRINTS
    written = memory.stat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr(file_hashes, "_hash_of", None)
        assert name_of(folder) == before
    assert memory.stat().st_ino == written, "nothing is new"
    file = folder / "model-00001-of-00002.safetensors"
    status = file.stat()
    for content, replaces in ((bytes([7]) * 1000, False), (bytes([8]) * 1000, True)):
        target = folder.parent / "new" if replaces else file
        target.write_bytes(content)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(target, file)
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (1000, status.st_mtime_ns)
        before, last = name_of(folder), before
        assert before != last, "equal size and time are not enough"


def test_files_that_were_just_written_are_read_again(folder: Path) -> None:
    """They may be written again within the step in which their file system counts time."""
    assert name_of(folder) == name_of(folder)
    assert not (folder.parent / "state" / FINGERPRINTS).exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}'])
def test_a_damaged_memory_is_none(folder: Path, content: str) -> None:
    before = name_of(folder)
    (folder.parent / "state" / FINGERPRINTS).write_text(content)
    assert name_of(folder) == before


def test_folders_without_weights_have_no_name(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert name_of(folder) is None


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for one that does not multiply bf16."""
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)


@pytest.mark.usefixtures("without_bf16")
def test_precision_where_only_our_own_code_multiplies_bf16() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("auto", cpu, own_bf16=True) == torch.bfloat16
    assert choose_dtype("auto", cpu, "bf16") == torch.bfloat16
    assert choose_dtype("float32", cpu, own_bf16=True) == torch.float32


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("mixtral-moe", torch.bfloat16),
        ("llama4-interleaved-nope", torch.float32),
    ],
)
def test_experts_stay_in_fp32_where_pytorch_alone_multiplies_them(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    byte_tokenizer(256).save_pretrained(tmp_path)
    model, _ = read_model(load_settings(model=str(tmp_path)), own_bf16=True)
    assert next(model.parameters()).dtype == dtype


def test_weights_that_are_given_are_taken_as_they_are_and_all_of_them(tmp_path: Path) -> None:
    written = tiny_model("llama")
    written.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = load_settings(model=str(tmp_path), dtype="float32")
    weights = dict(written.state_dict())
    model, _ = read_model(settings, weights=weights)
    assert all(
        model.state_dict()[name].data_ptr() == each.data_ptr() for name, each in weights.items()
    )
    for (name, buffer), (_, expected) in zip(
        model.named_buffers(), written.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected), name
    del weights["model.norm.weight"]
    with pytest.raises(ModelLoadError, match=r"no weights for model\.norm\.weight: delete"):
        read_model(settings, weights=weights)
