"""Prefaces are trained by what they are compared by."""

from __future__ import annotations

import pytest
import torch

from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.examples import Question
from kvlinker_lab.soft_prefaces import Distillation, Example, by_place, trained
from tests.toy_models import tiny_model

QUESTION = Question(
    id="1",
    dataset="own",
    task="own",
    passages=("The mill is old. ", "The bridge is new. ", "The well is dry. "),
    question="What is new?",
    answers=("The bridge",),
)


@pytest.fixture(scope="module")
def distillation() -> Distillation:
    return Distillation(tiny_model("llama"), byte_tokenizer())


@pytest.fixture(scope="module")
def example(distillation: Distillation) -> Example:
    return distillation.example(QUESTION, long=False)


def test_documents_behind_those_of_the_prompt_are_the_full_computations(
    distillation: Distillation, example: Example
) -> None:
    def before(place: int, _: Example) -> torch.Tensor:
        return distillation.embed(torch.cat(list(example.documents[:place])))

    divergence, same = distillation.compare(example, before)
    assert divergence.item() < 1e-6
    assert same == 1.0
    alone, _ = distillation.compare(example, lambda place, _: None)
    assert alone.item() > 1e-5


def test_training_brings_the_answer_nearer(distillation: Distillation, example: Example) -> None:
    text = distillation.embed(distillation.ids("Some notes. "))
    begun = text.expand(2, *text.shape)
    before, _ = distillation.compare(example, by_place(begun))
    soft = trained(distillation, begun, lambda: example, steps=12)
    after, _ = distillation.compare(example, by_place(soft))
    assert soft.shape == begun.shape
    assert after < 0.5 * before
