"""Checks that a model has passed are remembered, and only these."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvlinker.engines.embedded import verdicts
from kvlinker.engines.embedded.verdicts import FOLDER, Verdicts, code_beside


def of_model(state_dir: Path, content: str = "hash of the weights") -> Verdicts:
    return Verdicts(state_dir, {"content": content})


def files(state_dir: Path) -> list[Path]:
    return sorted((state_dir / FOLDER).iterdir())


def test_a_check_that_was_passed_is_remembered(tmp_path: Path) -> None:
    before = of_model(tmp_path)
    assert not before.passed("self-test")
    before.remember("self-test")
    assert of_model(tmp_path).passed("self-test")
    assert not of_model(tmp_path).passed("compiled steps")
    assert not of_model(tmp_path, "another hash").passed("self-test")


@pytest.mark.parametrize("part", ["processor", "code", "torch", "native"])
def test_another_machine_or_version_checks_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    of_model(tmp_path).remember("self-test")
    other = {**verdicts.surroundings(), part: "another"}
    monkeypatch.setattr(verdicts, "surroundings", lambda: other)
    assert not of_model(tmp_path).passed("self-test")


def test_a_damaged_file_is_no_verdict(tmp_path: Path) -> None:
    of_model(tmp_path).remember("self-test")
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole[:50], whole.replace(b"hash", b"hush"), whole + b" "):
        file.write_bytes(damaged)
        assert not of_model(tmp_path).passed("self-test")
    of_model(tmp_path).remember("self-test")
    assert file.read_bytes() == whole


def test_what_a_check_found_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.zeros(0)}
    assert of_model(tmp_path).tensors("inputs") is None
    of_model(tmp_path).remember_tensors("inputs", found)
    again = of_model(tmp_path).tensors("inputs")
    assert again is not None
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert of_model(tmp_path, "another hash").tensors("inputs") is None

    (file,) = (tmp_path / FOLDER).glob("*.safetensors")
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(whole[-8:], b"abcdefgh")):
        file.write_bytes(damaged)
        assert of_model(tmp_path).tensors("inputs") is None
    of_model(tmp_path).remember_tensors("inputs", found)
    other = {**verdicts.surroundings(), "torch": "another"}
    monkeypatch.setattr(verdicts, "surroundings", lambda: other)
    assert of_model(tmp_path).tensors("inputs") is None
    of_model(tmp_path).remember_tensors("inputs", {"a": found["a"]})
    assert list((tmp_path / FOLDER).glob("*.safetensors")) == [file]  # versions do not pile up


def test_the_verdict_of_another_model_is_none(tmp_path: Path) -> None:
    """However its file got the name of this one's."""
    of_model(tmp_path / "other", "other").remember("self-test")
    of_model(tmp_path).remember("self-test")
    (other,), (mine,) = files(tmp_path / "other"), files(tmp_path)
    mine.write_bytes(other.read_bytes())
    assert not of_model(tmp_path).passed("self-test")


def test_without_a_place_to_write_checks_are_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        of_model(tmp_path).remember("self-test")
    assert not of_model(tmp_path).passed("self-test")
    assert "The model is checked again next time" in caplog.text


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verdicts, "replace_file", full)
    of_model(tmp_path).remember("self-test")
    assert not of_model(tmp_path).passed("self-test")
    assert "No space left" in caplog.text


def test_two_servers_may_remember_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: of_model(tmp_path).remember("self-test"), range(32)))
    assert of_model(tmp_path).passed("self-test")
    assert len(files(tmp_path)) == 1


def test_code_that_comes_with_a_model_is_part_of_it(tmp_path: Path) -> None:
    nothing = code_beside(tmp_path)
    (tmp_path / "modeling_own.py").write_text("a = 1")
    first = code_beside(tmp_path)
    (tmp_path / "modeling_own.py").write_text("a = 2")
    assert len({nothing, first, code_beside(tmp_path)}) == 3
