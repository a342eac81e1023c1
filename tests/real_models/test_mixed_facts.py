"""With a real model, the default policy keeps documents apart as the full computation does."""

import os

import pytest
import torch

from kvlinker import LLM
from kvlinker.quality.evaluation.datasets.facts import facts
from kvlinker.quality.evaluation.metrics import names
from tests.real_models.conftest import QWEN, model_path

QUESTIONS = 6

SECONDS = 600.0
"""The most that the rows of one question may take on a busy machine."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = model_path(QWEN)
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)  # nothing else is run beside it
    with LLM(
        model=path,
        prefix_cache="off",
        state_dir=tmp_path_factory.mktemp("state"),
    ) as opened:
        yield opened
    torch.set_num_threads(threads)


def named(people, answers):
    """The number of answers that name one of the people in their place."""
    return sum(
        any(names(answer, each) for each in some)
        for some, answer in zip(people, answers, strict=True)
    )


@pytest.mark.parametrize("sentences", [1, 6])
def test_the_default_names_another_documents_person_no_more_often_than_full(llm, sentences):
    """Both right after the documents' creation, and once nothing of them is computed again."""
    answers: dict[str, list[str]] = {"full": [], "at once": [], "linked": []}
    recomputed = []
    asked = [facts(number, sentences) for number in range(QUESTIONS)]
    for each in asked:
        caches = llm.generate_context_cache(each.passages)
        messages = [{"role": "user", "content": [*caches, each.question]}]
        for name in answers:
            if name == "linked":
                llm.engine.settle().result(SECONDS)
            answer = llm.chat_completion(
                messages, policy="full" if name == "full" else None, max_tokens=32, temperature=0
            )
            answers[name].append(answer.text)
        recomputed.append(answer.usage.recomputed_tokens / answer.usage.prompt_tokens)
    right = {name: named([each.answers for each in asked], answers[name]) for name in answers}
    mixed = {name: named([each.wrong for each in asked], answers[name]) for name in answers}
    assert right["full"] >= QUESTIONS / 2, answers
    assert mixed["at once"] <= mixed["full"] + 1, answers
    assert max(recomputed) < 0.1
    assert right["linked"] >= right["full"] - 1, answers
    assert mixed["linked"] <= mixed["full"] + 1, answers
