"""Registries find what kvlinker's own modules, programs and installed packages register by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvlinker.base import registry as module
from kvlinker.base.errors import KVLinkerError
from kvlinker.base.registry import Registry


@pytest.fixture
def registry() -> Registry[Any]:
    return Registry("colour", own="kvlinker.store.format.codecs", group="kvlinker.colours")


def install(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    """Have one package installed that brings the colour red, and runs ``load`` when it is
    imported."""

    def installed(*, group: str) -> list[EntryPoint]:
        return [EntryPoint("red", "colours.red", group)] if group == "kvlinker.colours" else []

    monkeypatch.setattr(module, "entry_points", installed)
    monkeypatch.setattr(EntryPoint, "load", lambda _: load())


def test_names_are_taken_once(registry: Registry[Any]) -> None:
    value = object()
    assert registry.add("blue", value) is value
    assert registry.add("blue", value) is value
    with pytest.raises(ValueError, match=r"The colour 'blue' is registered already, by builtins"):
        registry.add("blue", object())
    assert registry.known() == {"blue": value}


def test_packages_are_imported_once(
    registry: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    install(monkeypatch, lambda: loads.append(registry.add("red", 1)))
    assert registry.known() == registry.known() == {"red": 1}
    assert loads == [1]


def test_a_package_that_cannot_be_imported_is_told(
    registry: Registry[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ImportError("no paint")

    install(monkeypatch, broken)
    with pytest.raises(
        KVLinkerError, match=r"colour 'red' cannot be loaded from colours.red: no paint. Repair"
    ):
        registry.known()
    install(monkeypatch, lambda: registry.add("red", 1))
    assert registry.known() == {"red": 1}
