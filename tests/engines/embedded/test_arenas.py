"""Threads share arenas of the C library, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from kvlinker.engines import embedded


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
    monkeypatch.setattr(embedded, "processors", lambda: processors)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    embedded._share_arenas()
    assert set_to == [(-8, arenas)]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    embedded._share_arenas()
    assert len(set_to) == 1


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    embedded._share_arenas()
