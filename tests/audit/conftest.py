"""The shipped model in memory, and questions that linking hurts most."""

from __future__ import annotations

import pytest

from kvlinker.config import load_settings
from kvlinker.embedded.model.loaded import LoadedModel
from kvlinker.embedded.model_loading import load_model
from kvlinker.research.evaluation.examples import Question


@pytest.fixture(scope="session")
def reader() -> LoadedModel:
    return load_model(load_settings())


@pytest.fixture(scope="session")
def anaphora(reader: LoadedModel) -> list[Question]:
    """Questions whose answer stands in a passage that does not name its subject."""
    from kvlinker.research.evaluation.contexts import ContextSplit, ContextSplitter
    from kvlinker.research.evaluation.datasets import load_dataset

    splitter = ContextSplitter(reader.tokenizer, ContextSplit.SEMANTIC, 512)
    examples = load_dataset("reader", splitter, tasks=("anaphora",)).examples
    return [example for example in examples if isinstance(example, Question)]
