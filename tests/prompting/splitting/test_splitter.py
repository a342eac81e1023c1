"""Splitters of one's own: how they are registered, what is made good for them, and what is
refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base import registry as registries
from kvlinker.base.errors import KVLinkerError
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.splitting import (
    Splitter,
    TokenLimit,
    register,
    split_text,
    splitter,
    splitters,
)
from tests.toy_tokenizers import byte_level

ENCODER = TextEncoder(byte_level())
GUIDE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a test registers forgotten afterwards."""
    monkeypatch.setattr(splitter._registry, "_values", dict(splitters()))


def cut(text: str, method: str, max_tokens: int = 64) -> list[str]:
    return [
        piece.text
        for piece in split_text(text, tokenizer=ENCODER, method=method, max_tokens=max_tokens)
    ]


class Lines(Splitter):
    """A piece is a line."""

    name = "lines"

    def split(self, text: str, limit: TokenLimit) -> Sequence[str]:
        return text.splitlines(keepends=True)


def test_names_are_those_of_the_api() -> None:
    assert {"fixed", "sentence", "paragraph", "passage", "markdown"} <= set(splitters())
    assert all(kind.description().startswith("A piece is ") for kind in splitters().values())


def test_pieces_are_limited_and_blank_ones_joined() -> None:
    register(Lines)
    text = "one\n\n\ntwo\n" + "the cat and a dog " * 40
    pieces = cut(text, "lines", max_tokens=20)
    assert "".join(pieces) == text
    assert pieces[:2] == ["one\n\n\n", "two\n"]
    assert max(len(ENCODER.encode_data(piece)) for piece in pieces) <= 20


@pytest.mark.parametrize("pieces", [[], ["one "], ["one two", "two"], ["ONE TWO"]])
def test_pieces_that_are_not_the_text_are_refused(pieces: list[str]) -> None:
    class Forgetful(Lines):
        name = "forgetful"

        def split(self, text: str, limit: TokenLimit) -> Sequence[str]:
            return pieces

    register(Forgetful)
    with pytest.raises(
        KVLinkerError, match=r"'forgetful' \(tests.prompting.splitting.test_splitter\)"
    ) as caught:
        cut("one two", "forgetful")
    assert caught.value.status == 500


def test_names_are_taken_once() -> None:
    class Other(Lines):
        name = "passage"

    assert "passage" in splitters()
    register(Lines)
    assert register(Lines) is Lines
    with pytest.raises(
        ValueError,
        match=r"'passage' is registered already, by kvlinker.prompting.splitting.methods.prose",
    ):
        register(Other)


def test_plugins_are_found_by_their_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(*, group: str) -> list[Any]:
        assert group == "kvlinker.splitters"
        return [EntryPoint("lines", f"{__name__}:register_lines", group)]

    monkeypatch.setattr(splitter._registry, "_loaded", False)
    monkeypatch.setattr(registries, "entry_points", installed)
    assert "lines" not in splitter._registry._values
    monkeypatch.setattr(EntryPoint, "load", lambda _: register(Lines))
    assert cut("one\ntwo", "lines") == ["one\n", "two"]


def test_the_guide_s_example_works() -> None:
    section = GUIDE.split("## A splitter")[1].split("\n## ")[0]
    programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {"tokenizer": byte_level()}
    printed: list[str] = []
    names["print"] = lambda *values: printed.append(" ".join(map(str, values)))
    for program in programs:
        exec(program, names)
    assert "\n".join(printed) == shown.strip()
