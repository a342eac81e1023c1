"""Every family that vLLM runs is linked as transformers has it, or refused in one line when the
worker starts."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.engines.embedded.conftest import linked_prompt
from tests.toy_models import BASE, FAMILIES, FOR_VLLM
from transformers import AutoConfig, AutoModelForCausalLM

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker_vllm.adapter import rotary
from kvlinker_vllm.worker import layers
from vllm_tests.linked_vllm import LinkedVLLM, difference, reference_of

TOLERANCE = 3e-5
REFUSED = [
    ("llama4-interleaved-nope", 1024, "set max_model_len to 256"),
    ("gemma3n-shared", 1024, "numbers that are not finite"),
    ("minicpm3-latents", 1024, "as where latents are expanded"),
]
"""Families, the longest prompts, and what the refusal says."""

NOT_RUN = {
    "diffllama-two-attentions",  # vLLM does not run it
    "falcon-one-key-written-out",  # vLLM's attention on CPUs wants other sizes of heads
    "gemma3n-shared",  # vLLM's class for text alone gives NaN
    "longcat-latents-interleaved",  # vLLM does not run it on CPUs
    "minicpm3-latents",  # see below
}
OWN_STEPS = {"gpt_oss-sinks": 1}
"""The steps in which vLLM itself computes what transformers does, linked or not, where these are
few."""
OPTIONS: dict[str, dict[str, Any]] = {
    # the prompts below are longer than what these models were pretrained with, or not
    "dynamic-rope": {"max_model_len": 256},
    "longrope": {"max_model_len": 256},
    "llama4-interleaved-nope": {"max_model_len": 256},
    "llama4-without-norms": {"max_model_len": 256},
    # vLLM's kernel for CPUs rotates one head of the queries here
    "deepseek_v2-latents-interleaved": {
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """An engine that did not start leaves vLLM's groups of processes behind."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    yield
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def started(family, models, state, **options):
    return LinkedVLLM(family, models, state, num_gpu_blocks_override=256, **options)


@pytest.mark.parametrize(
    "family",
    [family for family in (*FAMILIES, *FOR_VLLM) if family not in NOT_RUN],
)
def test_each_family_is_linked_as_transformers_has_it(family, models, tmp_path):
    for part in reference_of(family).modules():  # before vLLM has changed the classes of some
        part.do_not_compile = True
    linked = started(family, models, tmp_path, **OPTIONS.get(family, {}))
    try:
        prompt = linked_prompt(50, 71, 33, fresh=11, header=5)
        linked.cache(prompt)
        for policy in ("naive", "legolink-9", "full"):
            answer = linked.answer(prompt, policy, max_tokens=OWN_STEPS.get(family, 2))
            assert difference(answer, prompt, policy, family) < TOLERANCE
        linked.settle()
    finally:
        linked.close()


def test_a_longrope_that_exceeds_what_it_was_pretrained_with_is_linked_as_well(models, tmp_path):
    """Its angles are those of long prompts for all, as transformers has them for prompts as long as
    this one."""
    linked = started("longrope", models, tmp_path)
    linked.close()


@pytest.mark.parametrize(("family", "longest", "told"), REFUSED)
def test_what_cannot_be_linked_is_refused_in_one_line(family, longest, told, models, tmp_path):
    assert_refused(told, family, models, tmp_path, max_model_len=longest)


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (
            "opt",
            {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_attention_heads": 2},
            "applies no rotary embedding",
        ),
        ("bloom", {"n_layer": 2, "n_head": 2}, "ALiBi"),
    ],
)
def test_models_with_other_positions_are_refused(kind, options, told, models, tmp_path):
    config = AutoConfig.for_model(kind, **(BASE | options))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(models / kind)
    byte_tokenizer().save_pretrained(models / kind)
    assert_refused(told, kind, models, tmp_path)


def test_a_rotary_embedding_that_is_not_seen_is_noticed(models, tmp_path, monkeypatch):
    """Keys would be stored with it, and never be moved."""
    monkeypatch.setattr(rotary, "_is_rotary", lambda module: False)
    assert_refused("applies no rotary embedding", "longrope", models, tmp_path)


def test_norms_behind_the_rotary_embedding_that_are_not_seen_are_noticed(
    models, tmp_path, monkeypatch
):
    monkeypatch.setattr(rotary, "have_same_numbers", lambda given, turned: False)
    assert_refused(
        "link (stored KV", "llama4-interleaved-nope", models, tmp_path, max_model_len=256
    )


def test_a_rotary_embedding_that_is_not_applied_is_noticed(models, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "rotate", lambda rotary, positions, key: key)
    assert_refused("move (stored KV placed", "llama", models, tmp_path)


def assert_refused(told, family, models, state, **options):
    with pytest.raises(UnsupportedModelError) as caught:
        started(family, models, state, **options)
    assert told in caught.value.message
    assert "\n" not in caught.value.message
