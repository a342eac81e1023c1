"""Every causal language model class of transformers is linked exactly, or refused by a sentence
that says why."""

from pathlib import Path

import pytest
import torch

from kvlinker.engines.embedded.model.indexers import IndexerCall
from kvlinker.engines.embedded.model.obstacles import Obstacle
from kvlinker.engines.embedded.selftest import self_test
from kvlinker_lab.models.small_models import KINDS, small_model
from kvlinker_lab.models.verdicts import NEWLY_SEEN, read_linked, verdict

REFUSED = {
    Obstacle.STATE: {"reformer", "inkling_text"},
    Obstacle.COMPRESSION: {"deepseek_v4"},
    Obstacle.BIDIRECTIONAL: {"bert", "xlnet"},
    Obstacle.LEARNED: {"gpt2", "opt", "bart", "gpt_neo"},
    Obstacle.ALIBI: {"bloom", "mpt"},
    Obstacle.NO_ROTARY: {"ctrl"},
    Obstacle.INPUT: {"xmod"},
}
"""Some models of each kind that is refused."""

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.mark.parametrize("obstacle", REFUSED, ids=[obstacle.name for obstacle in REFUSED])
def test_a_refusal_says_what_kind_of_model_it_is(obstacle):
    found = {kind: verdict(kind).reason for kind in REFUSED[obstacle]}
    assert found == dict.fromkeys(REFUSED[obstacle], obstacle)


def test_indexers_of_an_unknown_form_are_refused_for_that(monkeypatch):
    monkeypatch.setattr(IndexerCall, "is_known", False)
    assert verdict("deepseek_v32").reason == Obstacle.SELECTION


@pytest.mark.whole
def test_the_page_says_which_classes_are_linked():
    """None of those that are linked is lost, none more is accepted unseen, and each refusal has a
    reason that is known."""
    found = [verdict(kind) for kind in KINDS]
    assert {each.kind: each.error is not None for each in found} == read_linked(PAGE)
    assert not [each for each in found if NEWLY_SEEN in each.reason]


@pytest.mark.whole
def test_what_is_linked_is_exact_by_a_wide_margin():
    for kind in (
        "afmoe",
        "codegen",
        "gpt_neox_japanese",
        "diffllama",
        "gemma3n_text",
        "gemma4_text",
        "llama4_text",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "doge",
        "gemma3",
        "got_ocr2",
        "glm_moe_dsa",
        "gpt_oss",
        "hy_v4",
        "axk2",
        "minimax_m3_vl_text",
        "granite",
        "jetmoe",
        "longcat_flash",
        "ministral3",
        "qwen3_moe",
        "smollm3",
        "falcon_h1",
        "jamba",
        "kimi_linear",
        "lfm2",
        "minimax",
        "nemotron_h",
        "phimoe",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "mamba",
        "mamba2",
        "falcon_mamba",
        "zamba",
        "zamba2",
    ):
        checks = self_test(small_model(kind))
        assert all(check.error < 1e-5 for check in checks if check.name != "relocate"), (
            kind,
            checks,
        )


def test_models_of_other_forms_keep_working_outside_kvlinker():
    """What looks at them changes nothing for whoever else runs them in the process."""
    tokens = torch.arange(3, 60)[None]
    for kind in ("gptj", "falcon", "gemma4_text", "llama4_text", "qwen4_exp_text"):
        model = small_model(kind)
        with torch.inference_mode():
            before = model(tokens).logits
            verdict(kind)
            assert torch.equal(model(tokens).logits, before)
