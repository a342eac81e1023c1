"""The page for operators: the settings in its table exist, and have the defaults that it gives."""

from __future__ import annotations

import re
from pathlib import Path

from kvlinker.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_settings_of_the_page_exist_with_their_defaults() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Configuration\n")[1].split("\n## ")[0]
    compared = 0
    for row in re.findall(r"^\| (`.*)$", section, re.MULTILINE):
        settings, defaults, _ = row.split(" | ", 2)
        names = re.findall(r"`(\w+)`", settings)
        assert set(names) <= Settings.model_fields.keys()
        given = defaults.split(", ")
        if len(given) == 1:
            given *= len(names)
        for name, default in zip(names, given, strict=True):
            value = re.fullmatch(r"`?([\w-]+)`?(?: s)?", default)
            if value and value[1] not in {"none", "off", "on", *Settings.model_fields}:
                assert str(Settings.model_fields[name].default).removesuffix(".0") == value[1], name
                compared += 1
    assert compared > 20
