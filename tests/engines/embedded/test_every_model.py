"""Every causal language model class of transformers is linked exactly, or refused by a sentence
that says why."""

import pytest
import torch

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.embedded.model.obstacles import Obstacle
from kvlinker.engines.embedded.selftest import require_exact, self_test
from tests.every_model import KINDS, NOT_MADE, small_model

REFUSED = {
    Obstacle.SELECTION: {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"},
    Obstacle.STATE: {
        "bamba",
        "falcon_h1",
        "jamba",
        "kimi_linear",
        "lfm2",
        "mamba2",
        "minimax",
        "qwen3_5",
        "rwkv",
        "zaya",
    },
    Obstacle.BIDIRECTIONAL: {"bert", "xlnet"},
    Obstacle.LEARNED: {"gpt2", "opt", "bart", "gpt_neo"},
    Obstacle.ALIBI: {"bloom", "mpt"},
    Obstacle.ROTARY_FORM: {"gemma4_text", "llama4_text"},
    Obstacle.ATTENTION_FORM: {"falcon", "gptj", "gpt_neox_japanese"},
    Obstacle.NO_ROTARY: {"ctrl"},
    Obstacle.INPUT: {"xmod"},
    Obstacle.INEXACT: {"doge"},
}
"""Some models of each kind that is refused."""

EXACT = """
    afmoe apertus arcee aria_text axk1 bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm
    dbrx deepseek_v2 deepseek_v3 dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu
    gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax jais2 jetmoe laguna llama longcat_flash mellum mimo_v2_flash minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi
    nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal qwen2 qwen2_moe
    qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""


def verdict(kind):
    """Return the obstacle by which a model of this class is refused; None where it is linked
    exactly."""
    try:
        require_exact(small_model(kind))
    except UnsupportedModelError as error:
        (found,) = (
            obstacle
            for obstacle in Obstacle
            if f"is not supported yet: {obstacle}. " in error.message
        )
        return found
    return None


@pytest.mark.parametrize("obstacle", REFUSED, ids=[obstacle.name for obstacle in REFUSED])
def test_a_refusal_says_what_kind_of_model_it_is(obstacle):
    assert {kind: verdict(kind) for kind in REFUSED[obstacle]} == dict.fromkeys(
        REFUSED[obstacle], obstacle
    )


@pytest.mark.slow
def test_every_class_is_linked_or_refused_with_a_reason():
    """None of those that are linked is lost, and none more is accepted unseen."""
    found = {kind: verdict(kind) for kind in KINDS if kind not in NOT_MADE}
    assert {kind for kind, obstacle in found.items() if obstacle is None} == set(
        EXACT.split()
    ) & set(KINDS)


@pytest.mark.slow
def test_what_is_linked_is_exact_by_a_wide_margin():
    for kind in (
        "afmoe",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "gemma3",
        "gpt_oss",
        "granite",
        "jetmoe",
        "longcat_flash",
        "ministral3",
        "qwen3_moe",
        "smollm3",
    ):
        checks = self_test(small_model(kind))
        assert all(check.error < 5e-6 for check in checks if check.name != "relocate"), (
            kind,
            checks,
        )


def test_models_of_other_forms_keep_working_outside_kvlinker():
    """What looks at them changes nothing for whoever else runs them in the process."""
    tokens = torch.arange(3, 60)[None]
    for kind in ("gptj", "gemma4_text", "qwen4_exp_text"):
        model = small_model(kind)
        with torch.inference_mode():
            before = model(tokens).logits
            assert verdict(kind) is not None
            assert torch.equal(model(tokens).logits, before)
