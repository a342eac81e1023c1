"""Families that are not linked any more are refused before their weights are read."""

import pytest
from transformers import AutoConfig

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.contract.model_files import read_model
from kvlinker.engines.contract.removed_models import REMOVED, refuse_removed
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.settings import load_settings
from kvlinker_lab.models.small_models import small_model

NGRAMS = {"ple_layer_ids": [1], "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "sizes"), [*((kind, {}) for kind in REMOVED), ("qwen4_exp_text", NGRAMS)]
)
def test_a_removed_family_is_refused_by_its_configuration(kind, sizes, tmp_path):
    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    expected = f"no longer links models of type '{kind}' .* choose another model"
    with pytest.raises(UnsupportedModelError, match=expected):
        read_model(load_settings(model=str(tmp_path)))


def test_a_model_that_was_made_elsewhere_is_refused_too():
    with pytest.raises(UnsupportedModelError, match="no longer links models of type 'rwkv'"):
        anatomy_of(small_model("rwkv"))


@pytest.mark.parametrize("kind", ["llama", "mamba", "qwen4_exp", "qwen4_exp_text", "kimi_k25"])
def test_other_families_are_not_refused(kind):
    refuse_removed(AutoConfig.for_model(kind))
