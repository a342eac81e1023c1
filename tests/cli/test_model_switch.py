"""``kvlinker serve`` loads another model in the place of its own, and goes back where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.errors import ModelLoadError
from kvlinker.cli import serve
from kvlinker.doors.http.edge.address import bind
from kvlinker.settings import load_settings


def served_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *ends: str | Exception | None
) -> list[tuple[str, str | None]]:
    """Serve until an end is None; each of the others names the next model, or is raised by the
    loading. Returns the models, each with the failure before it."""
    served: list[tuple[str, str | None]] = []
    left = list(ends)

    def until_end(settings: Any, *given: Any) -> tuple[float | None, str | None]:
        served.append((settings.model, given[-1]))
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return None, end

    monkeypatch.setattr(serve, "_serve_until_end", until_end)
    settings = load_settings(state_dir=tmp_path, model="first", served_model_name="mine")
    with bind("127.0.0.1", 0) as listener:
        serve._serve(settings, listener)
    return served


def test_models_take_one_anothers_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = served_models(monkeypatch, tmp_path, "second", "first", None)
    assert served == [("first", None), ("second", None), ("first", None)]


def test_it_goes_back_from_a_model_that_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = served_models(monkeypatch, tmp_path, "broken", ModelLoadError("No weights."), None)
    assert served == [
        ("first", None),
        ("broken", None),
        ("first", "broken cannot be served: No weights."),
    ]


def test_the_first_model_has_none_to_go_back_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match="No weights"):
        served_models(monkeypatch, tmp_path, ModelLoadError("No weights."))
