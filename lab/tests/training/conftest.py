"""The tokenizer that training makes, shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvlinker_lab.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests run on one worker of pytest-xdist: the library's prose and the tokenizer
    are made once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("training"))
