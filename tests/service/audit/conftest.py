"""The shipped model in memory, and questions that linking hurts most."""

from __future__ import annotations

import pytest

from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.quality.evaluation.examples import Question
from kvlinker.settings import load_settings


@pytest.fixture(scope="session")
def reader() -> LoadedModel:
    return load_model(load_settings())


@pytest.fixture(scope="session")
def anaphora(reader: LoadedModel) -> list[Question]:
    """Questions whose answer stands in a passage that does not name its subject."""
    from kvlinker.quality.evaluation.contexts import ContextSplit, ContextSplitter
    from kvlinker.quality.evaluation.datasets import load_dataset

    splitter = ContextSplitter(reader.tokenizer, ContextSplit.SEMANTIC, 512)
    examples = load_dataset("reader", splitter, tasks=("anaphora",)).examples
    return [example for example in examples if isinstance(example, Question)]
