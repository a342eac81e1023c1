"""The tokenizer that training makes, shared by the tests."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from kvlinker_lab.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer()
