"""The keyword arguments that editors and type checkers know are the settings."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from pydantic import TypeAdapter

from kvlinker.settings import Options, Settings

HINTS = get_type_hints(Options)

WORDS = [
    name for name, field in Settings.model_fields.items() if "Literal" in str(field.annotation)
]


def test_all_settings_but_the_model_are_options() -> None:
    assert list(HINTS) == [name for name in Settings.model_fields if name != "model"]


def test_an_option_takes_the_default_of_its_setting(subtests: pytest.Subtests) -> None:
    for name, hint in HINTS.items():
        with subtests.test(name):
            default = Settings.model_fields[name].get_default(call_default_factory=True)
            TypeAdapter(hint).validate_python(default)
            TypeAdapter(hint).validate_python(None)


def test_an_option_takes_the_words_of_its_setting(subtests: pytest.Subtests) -> None:
    for name in WORDS:
        with subtests.test(name):
            words = {word for part in get_args(HINTS[name]) for word in get_args(part)}
            assert words == set(get_args(Settings.model_fields[name].annotation))
