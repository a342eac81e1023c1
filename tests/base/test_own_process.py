"""A process of a command is set up; a program that imports kvlinker stays as it is."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from kvlinker.base import own_process


@pytest.mark.parametrize(
    ("processors", "arenas"),
    [(1, 1), (8, 1), (9, 2), (64, 8)],
)
def test_one_arena_serves_eight_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int, arenas: int
) -> None:
    set_to: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda option, value: set_to.append((option, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(own_process, "processors", lambda: processors)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    own_process.share_arenas()
    assert set_to == [(-8, arenas)]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    own_process.share_arenas()
    assert len(set_to) == 1


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    own_process.share_arenas()
