"""Evaluation: held-out prompts in the chat format, and passages that are read apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvlinker_lab.training.evaluate import HeldOutPrompt, _passages_apart, held_out_prompts
from kvlinker_lab.training.questions import KINDS, WorldSettings
from kvlinker_lab.training.tokenizer import ASSISTANT, BOS, END, USER, save_tokenizer


@pytest.fixture(scope="module")
def loaded(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_prompts_have_the_chat_format(
    loaded: PreTrainedTokenizerBase, subtests: pytest.Subtests
) -> None:
    for kind in KINDS:
        with subtests.test(kind):
            for prompt in held_out_prompts(loaded, kind, 3, (200, 400), WorldSettings()):
                assert prompt.kind == kind
                assert 200 <= len(prompt.ids) <= 400
                assert prompt.ids[:2] == [BOS, USER]
                assert prompt.ids[-2:] == [END, ASSISTANT]
                assert prompt.answer[-1] == END
                text = loaded.decode(prompt.ids[2:-2])
                messages = [{"role": "user", "content": text}]
                whole = loaded.apply_chat_template(messages, add_generation_prompt=True)[
                    "input_ids"
                ]
                assert whole == prompt.ids


def test_passages_apart_see_themselves_and_the_first_tokens() -> None:
    prompt = HeldOutPrompt(
        [BOS, USER, 10, 11, 12, 13, 14, 20, END, ASSISTANT], [30, END], "single", [2, 3]
    )
    visible = _passages_apart(prompt, 12)
    assert visible[3].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert visible[5].nonzero()[:, 0].tolist() == [0, 1, 4, 5]
    assert visible[9:].equal(torch.ones(12, 12).tril().bool()[9:])
