"""What is dropped from memory is a file's, and nothing beside it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from kvlinker.engines.embedded.model import memory

PAGE = mmap.PAGESIZE

needs_mappings = pytest.mark.skipif(
    not memory._MAPPINGS.exists(), reason="the system does not tell what is mapped"
)


def mapped(path: Path, pages: int) -> torch.Tensor:
    """Bytes of a file of so many pages, mapped for this process alone; each page is filled with its
    number."""
    path.write_bytes(b"".join(bytes([page]) * PAGE for page in range(pages)))
    with path.open("r+b") as file:
        return torch.frombuffer(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
        )


@needs_mappings
def test_a_weight_in_a_file_is_dropped_page_by_page(tmp_path: Path) -> None:
    file = mapped(tmp_path / "weights", 5)
    file[:] = 99  # what was changed shows which pages are read from the file again
    memory.drop_mapped(file[PAGE // 2 : 4 * PAGE + 10])
    assert [int(file[page * PAGE]) for page in range(5)] == [99, 1, 2, 3, 99]


def weights_of(file: torch.Tensor, *pages: int) -> nn.Sequential:
    """A chain of linear layers without bias; the weight of each lies in a page of the file."""
    layers = []
    for page in pages:
        layer = nn.Linear(16, 16, bias=False)
        own = file[page * PAGE : page * PAGE + 4 * 256]
        layer.weight = nn.Parameter(own.view(torch.float32).view(16, 16), requires_grad=False)
        layers.append(layer)
    return nn.Sequential(*layers)


@needs_mappings
def test_modules_drop_their_pages_when_they_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(memory, "_drop", lambda weight: dropped.append(weight.data_ptr()))
    model = weights_of(mapped(tmp_path / "weights", 4), 0, 2)
    model.append(nn.Linear(16, 16))  # in memory of its own
    addresses = [layer.get_parameter("weight").data_ptr() for layer in model]
    with memory.dropping_mapped(model):
        model(torch.zeros(1, 16))
        assert dropped == addresses[:2]
    model(torch.zeros(1, 16))
    assert dropped == addresses[:2]
    memory.drop_unread(model)
    assert dropped == 2 * addresses[:2]


@needs_mappings
def test_what_was_written_to_weights_stays(tmp_path: Path) -> None:
    file = mapped(tmp_path / "weights", 2)
    model = weights_of(file, 0, 1)
    file[PAGE] = 99
    with memory.dropping_mapped(model):
        model(torch.zeros(1, 16))
    memory.drop_unread(model)
    assert int(file[PAGE]) == 99


def test_other_memory_is_left_alone() -> None:
    for weight in (
        torch.full((64 * PAGE,), 7, dtype=torch.uint8),
        torch.full((10,), 7),
        torch.empty(0),
    ):
        before = weight.clone()
        memory.drop_mapped(weight)
        assert torch.equal(weight, before)


def test_systems_that_tell_nothing_keep_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MAPPINGS", tmp_path / "missing")
    monkeypatch.setattr(memory, "_PAGES", tmp_path / "missing")
    file = mapped(tmp_path / "weights", 3)
    file[:] = 99
    memory.drop_mapped(file)
    memory.drop_unread(weights_of(file, 0, 1))
    assert file.eq(99).all()


def test_freed_memory_can_be_returned_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.return_freed()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    memory.return_freed()
